"""The numeric proof of a compiled program: its logits and KV planes against the unfused graph in float64.

Three steps run: prompts and the first chunk of another; a token for each of the prompts beside the second
chunk; and a token for each of all. So fresh and cached context, prefill, mixed steps and decode, and on a GPU
both of its programs, meet the budget of the error rule
max|ours - truth| <= FACTOR * (max|plain - truth| + eps * max|truth|), plain being the unfused graph in type.
The KV planes are judged together, each in units of its own largest value: one bad plane in sixty shows, and
the noise of sixty maxima does not.

In 16 bits the largest error says little: a scale of attention that is wrong by a fifth hides below it. So the
errors of each token are compared too, RMS over its values, ours with those of the unfused graph. They stem
from the same roundings, so the median of their ratios is near 1, in each step; and a plane of KV is judged by
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from ostinato.errors import CompileError, ModelError
from ostinato.graph.facts import KVLayer
from ostinato.ops import all_ops
from ostinato.ops.step_inputs import PoolInputs, StepInputs
from ostinato.runtime.artifact import Proof
from ostinato.runtime.program import Bound

CHUNKS = (9, 4)  # of one prompt
PROMPTS = (13, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8)  # enough of them that a median over decodes means something
# All begin alike: what comes first decides how large a network's numbers become, and whether a row of it is
# so unsteady in 16 bits that right programs differ by more than the budget.
ALIKE = 6
LOGIT_ROWS = 64  # at most, of a step
TINY = torch.finfo(torch.float32).tiny
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# The rule for one op has 2. A whole network adds up the noise of hundreds of sums: right orders of summation
# drew errors of 2.8e-5 to 8.4e-5 on the demo model, where the unfused graph has 5.8e-5. A wrong rewrite is
# off by a hundred times that.
FACTOR = 4.0
# Ratios of typical errors: 0.97 to 1.27 for logits and to 1.18 for the worst plane on the demo model in
# bfloat16, eight draws of tokens; closer to 1 on tiny ones of fifteen families. Attention's scale off by 5 %
# in all layers gives 3.2 in a plane, by 20 % in the sixth of thirty layers too (in the twenty-first 1.2,
# which is not seen), an epsilon of 1e-3 in the norms 2.0. In float32 the order of a sum makes the error, and
# what is wrong is off by thousands.
TYPICAL = 1.75
_LEAST = 1 / 16  # of eps: an error below this share counts as so much
CPU = torch.device("cpu")
Run = tuple[list[Tensor], list[Tensor]]  # logits of each step, KV planes
ROUTED_ROWS = 0.75  # share of rows that must meet the budget where a router chooses experts: choices may flip


def prove(
    graph_module: fx.GraphModule,
    weights: Callable[[fx.Node], Tensor],
    program: Bound,
    kv_layers: Sequence[KVLayer],
    *,
    dtype: torch.dtype,
    vocab_size: int,
    block_tokens: int,
    above: int = 0,
    longest: int = 1 << 20,
    device: torch.device = CPU,
    seed: int = 0,
) -> Proof:
    """Run unfused graph (float64 and `dtype`) and program on the same tokens; raise CompileError over budget.

    ModelError when the model itself gives NaN or infinity, in float64 or in `dtype`.

    `weights` gives the tensor of a weight placeholder, in the type that the program uses. The first step has
    more than `above` tokens: a program for few tokens is not all then. Sequences have at most `longest`, or
    14. All runs are on `device`; on a GPU the unfused graph's weights stay there, which takes the size of the
    model.
    """
    prompts = _prompts(above, longest)
    steps = [_moved(inputs, device) for inputs in _steps(prompts, vocab_size, block_tokens, seed)]
    if device != CPU:
        weights = kept(weights, device)
    runs: dict[str, Run] = {}
    for name, compute in (("truth", torch.float64), ("plain", None), ("ours", None)):
        planes = _planes(kv_layers, 1 + steps[0].block_tables.numel(), block_tokens, compute or dtype, device)
        logits = []
        for inputs in steps:
            if name == "ours":
                logits.append(program(inputs, planes).clone())
            else:
                logits.append(interpret(graph_module, weights, inputs, planes, compute))
        runs[name] = [one.double().cpu() for one in logits], [plane.double().cpu() for plane in planes]
    refuse_infinite({name: (torch.cat(logits), planes) for name, (logits, planes) in runs.items()}, dtype)
    proof = _compare(runs, dtype, routed=_has_router(graph_module))
    refuse_errors(proof, "logits")
    return proof


def refuse_errors(proof: Proof, what: str) -> None:
    """Raise CompileError when `what`, or KV, is further from float64 than it may be."""
    typical, kv_typical = proof.typical or 0.0, proof.kv_typical or 0.0
    is_near = proof.max_error <= proof.budget and proof.kv_max_error <= proof.kv_budget
    if is_near and max(typical, kv_typical) <= proof.typical_budget:
        return
    raise CompileError(
        f"numeric proof failed: {what} differ from float64 by {proof.max_error:.3g} (allowed "
        f"{proof.budget:.3g}, unfused graph {proof.unfused_error:.3g}), KV by {proof.kv_max_error:.3g} "
        f"(allowed {proof.kv_budget:.3g}); errors are {typical:.3g} times those of the unfused graph, in the "
        f"worst plane of KV {kv_typical:.3g} times (allowed {proof.typical_budget:.3g}); find the guilty "
        "rewrite with passes.fuel, leave it out with passes.off, and report it"
    )


def refuse_infinite(runs: Mapping[str, tuple[Tensor, Sequence[Tensor]]], dtype: torch.dtype) -> None:
    """Without numbers to compare with, any error would be allowed."""
    infinite = {
        name: not all(bool(tensor.isfinite().all()) for tensor in (logits, *planes))
        for name, (logits, planes) in runs.items()
    }
    if infinite["truth"]:
        raise ModelError(
            "the model gives NaN or infinity, in float64 too: its weights hold such values or its config is "
            "wrong; download it again"
        )
    if infinite["plain"]:
        raise ModelError(f"the model overflows {dtype} and gives NaN; set graph.dtype to bfloat16 or float32")


def _prompts(above: int, longest: int) -> list[int]:
    """Lengths of prompts that with a first chunk are more than `above` tokens; there is room for two more."""
    most = max(1, longest - 2)
    lengths = [min(length, most) for length in PROMPTS]
    while (lacking := above + 1 - CHUNKS[0] - sum(lengths)) > 0:
        lengths.append(min(lacking, most))
    return lengths


def _steps(prompts: Sequence[int], vocab_size: int, block_tokens: int, seed: int) -> list[StepInputs]:
    """The prompt in chunks is the last sequence."""
    generator = torch.Generator().manual_seed(seed)
    count = len(prompts) + 1
    width = -(-max(*prompts, sum(CHUNKS)) // block_tokens) + 1
    tables = torch.arange(1, count * width + 1, dtype=torch.int32).view(count, width)  # block 0 stays unused
    ones = [1] * len(prompts)
    texts = torch.randint(vocab_size, (count, width * block_tokens), generator=generator)
    texts[:, :ALIKE] = texts[0, :ALIKE]
    done, out = [0] * count, []
    for lengths in ([*prompts, CHUNKS[0]], [*ones, CHUNKS[1]], [*ones, 1]):
        positions = [torch.arange(at, at + n) for at, n in zip(done, lengths, strict=True)]
        slots = [
            table[p // block_tokens].long() * block_tokens + p % block_tokens
            for table, p in zip(tables, positions, strict=True)
        ]
        done = [d + n for d, n in zip(done, lengths, strict=True)]
        tokens = sum(lengths)
        out.append(StepInputs(
            token_ids=torch.cat([text[p] for text, p in zip(texts, positions, strict=True)]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            block_tables=tables,
            seq_lens=torch.tensor(done, dtype=torch.int32),
            query_start=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            logit_rows=torch.linspace(0, tokens - 1, min(tokens, LOGIT_ROWS)).round().long(),
        ))  # fmt: skip
    return out


def _moved(inputs: StepInputs, device: torch.device) -> StepInputs:
    return StepInputs(*(tensor.to(device) for tensor in inputs))


def kept(weights: Callable[[fx.Node], Tensor], device: torch.device) -> Callable[[fx.Node], Tensor]:
    """`weights` on the device; each is evaluated and moved once."""
    there: dict[fx.Node, Tensor] = {}

    def weight(node: fx.Node) -> Tensor:
        if node not in there:
            there[node] = weights(node).to(device)
        return there[node]

    return weight


def _planes(
    kv_layers: Sequence[KVLayer], blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    return [
        torch.zeros(blocks, block_tokens, layer.kv_heads, size, dtype=dtype, device=device)
        for layer in kv_layers
        for size in (layer.k_size, layer.v_size)
    ]


@torch.no_grad()
def interpret(
    graph_module: fx.GraphModule,
    weights: Callable[[fx.Node], Tensor],
    inputs: StepInputs | PoolInputs,
    planes: Sequence[Tensor],
    compute: torch.dtype | None,
) -> Tensor:
    """Run the graph node by node; with `compute`, every float tensor and every cast becomes that type.

    Weights are fetched and widened where they are used, so that float64 needs memory for one weight at a
    time.
    """
    values: dict[fx.Node, Any] = {}
    step, kv = iter(inputs), iter(planes)
    last_use = {used: node for node in graph_module.graph.nodes for used in node.all_input_nodes}

    def argument(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        tensor = weights(node)
        return tensor.to(compute) if compute and tensor.dtype in _FLOATS else tensor

    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.meta["role"] != "weight":
                values[node] = next(step if node.meta["role"] == "step" else kv)
        elif node.op == "output":
            value = node.args[0]
            return values[value[0] if isinstance(value, tuple | list) else value]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
            args, kwargs = _placed(args, inputs.token_ids.device), _placed(kwargs, inputs.token_ids.device)
            if compute:
                args, kwargs = _widen(args, compute), _widen(kwargs, compute)
                if node.target == torch.ops.aten._assert_tensor_metadata.default:
                    continue
            values[node] = _plain(node.target)(*args, **kwargs)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    values.pop(used, None)
    raise CompileError("graph without an output")


def _placed(value: Any, device: torch.device) -> Any:
    """The graph was traced on a CPU; what it makes there belongs on the device of the run."""
    if isinstance(value, tuple | list):
        return type(value)(_placed(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _placed(item, device) for key, item in value.items()}
    return device if isinstance(value, torch.device) else value


def _plain(target: Any) -> Any:
    """The reference of one of our own ops: its kernels take no float64."""
    module = (
        getattr(all_ops, str(target).split(".")[1], None) if str(target).startswith("ostinato.") else None
    )
    return target if module is None else getattr(module, f"{str(target).split('.')[1]}_reference")


def _widen(value: Any, compute: torch.dtype) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_widen(item, compute) for item in value)
    if isinstance(value, dict):
        return {key: _widen(item, compute) for key, item in value.items()}
    return compute if isinstance(value, torch.dtype) and value in _FLOATS else value


def _has_router(graph_module: fx.GraphModule) -> bool:
    return any(node.target == torch.ops.aten.topk.default for node in graph_module.graph.nodes)


def _compare(runs: Mapping[str, Run], dtype: torch.dtype, *, routed: bool) -> Proof:
    eps = torch.finfo(dtype).eps
    (truths, truth_kv), (plains, plain_kv), (all_ours, ours_kv) = runs["truth"], runs["plain"], runs["ours"]
    truth, plain, ours = torch.cat(truths), torch.cat(plains), torch.cat(all_ours)
    error = _worst(ours - truth, routed=routed)
    unfused = _worst(plain - truth, routed=routed)
    kv_error, kv_unfused, kv_typical = 0.0, 0.0, 0.0
    for true, old, new in zip(truth_kv, plain_kv, ours_kv, strict=True):
        scale = max(float(true.abs().max()), TINY)
        kv_error = max(kv_error, _worst((new - true).flatten(0, 1), routed=routed) / scale)
        kv_unfused = max(kv_unfused, _worst((old - true).flatten(0, 1), routed=routed) / scale)
        written = true.flatten(0, 1).flatten(1).any(1)  # slots of tokens
        t, o, n = (plane.flatten(0, 1)[written] for plane in (true, old, new))
        kv_typical = max(kv_typical, typical_ratio(t, o, n, eps))
    return Proof(
        tokens=len(truth),
        max_error=error,
        budget=FACTOR * (unfused + eps * float(truth.abs().max())),
        unfused_error=unfused,
        argmax_equal=bool(torch.equal(ours.argmax(-1), truth.argmax(-1))),
        kv_max_error=kv_error,
        kv_budget=FACTOR * (kv_unfused + eps),
        typical=max(typical_ratio(*step, eps) for step in zip(truths, plains, all_ours, strict=True)),
        kv_typical=kv_typical,
        typical_budget=typical_budget(dtype),
    )


def typical_budget(dtype: torch.dtype) -> float:
    """What `typical_ratio` may be in a type."""
    return FACTOR if dtype == torch.float32 else TYPICAL


def typical_ratio(truth: Tensor, plain: Tensor, ours: Tensor, eps: float) -> float:
    """Median over the rows of a tensor: RMS error of ours by that of the unfused graph."""
    if not len(truth):
        return 0.0
    least = _LEAST * eps * _rms(truth)
    ratios = (_rms(ours - truth) + least) / (_rms(plain - truth) + least).clamp_min(TINY)
    return float(ratios.nan_to_num(nan=float("inf")).median())


def _rms(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).square().mean(1).sqrt()


def _worst(difference: Tensor, *, routed: bool) -> float:
    """Largest error; NaN is infinite. With a router: the largest in the better `ROUTED_ROWS` of rows."""
    rows = difference.abs().flatten(1).amax(1).nan_to_num(nan=float("inf"))
    if routed:
        rows = rows.sort().values[: max(1, int(len(rows) * ROUTED_ROWS))]
    return float(rows.max())
