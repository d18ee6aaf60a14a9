"""Trace a built model into one FX graph: symbolic token count, mutated KV planes, weights as inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from ostinato.errors import CompileError, ModelError
from ostinato.graph.build import BuiltModel
from ostinato.graph.facts import ModelFacts
from ostinato.graph.hooks import CaptureHooks
from ostinato.ops.step_inputs import StepInputs
from ostinato.ops.weight_expr import CONSTANT, load

MAX_STEP_TOKENS = 8192


class CapturedGraph(NamedTuple):
    """A traced model. Placeholders are, in order: weights (`meta["weight"]`), step inputs, KV planes.

    `meta["role"]` of a placeholder is "weight", "step" or "kv"; a weight's `meta["weight"]` is an expression
    whose load names are parameters of the transformers module.
    """

    graph_module: fx.GraphModule
    facts: ModelFacts
    constants: dict[str, Tensor]  # values of weights that no checkpoint holds
    alone: fx.GraphModule | None = None  # of a classifier: transformers' own head on one sequence, for proof


class _Step(nn.Module):
    """The calling convention of a step around a transformers causal LM."""

    def __init__(self, model: nn.Module, hooks: CaptureHooks) -> None:
        super().__init__()
        self.model = model
        self._hooks = hooks

    def forward(
        self, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, block_tables: Tensor, seq_lens:
        Tensor, query_start: Tensor, logit_rows: Tensor, kv: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        self._hooks.begin(slot_mapping, block_tables, seq_lens, query_start, kv)
        out = self.model(
            input_ids=token_ids[None],
            attention_mask=torch.ones_like(token_ids)[
                None
            ],  # no packing detection; the ops know the sequences
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        return out.logits[0]


def sample_inputs(*, tokens: int = 7, num_seqs: int = 2, width: int = 3, rows: int = 2) -> StepInputs:
    """Valid inputs of a small step, for tracing."""
    lengths = torch.tensor([tokens - (num_seqs - 1)] + [1] * (num_seqs - 1), dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    return StepInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.cat([torch.arange(int(n)) for n in lengths]),
        slot_mapping=torch.arange(tokens),
        block_tables=torch.zeros(num_seqs, width, dtype=torch.int32),
        seq_lens=lengths,
        query_start=starts,
        logit_rows=torch.arange(rows),
    )


def capture(
    built: BuiltModel, hooks: CaptureHooks, facts: dict[str, Any], *, block_tokens: int = 16
) -> CapturedGraph:
    """Trace `built`; `facts` are the fields of ModelFacts that come from the config and not from the trace.

    Raises ModelError for math that cannot be carried, CompileError when tracing itself fails.
    """
    step = _Step(built.model, hooks)
    inputs = sample_inputs()
    dtype = getattr(torch, facts["dtype"])
    with hooks.registered(), torch.no_grad():
        with built.fake_mode:  # dry run: how many KV planes, and of which shapes
            fake_inputs = [built.fake_mode.from_tensor(t, static_shapes=True) for t in inputs]
            step(*fake_inputs, None)
        planes = []
        with built.fake_mode:
            for layer in hooks.kv_layers:
                for size in (layer.k_size, layer.v_size):
                    planes.append(torch.empty(5, block_tokens, layer.kv_heads, size, dtype=dtype))
        exported = export(step, (*inputs, planes), _dynamic_shapes(planes))
    graph_module = exported.graph_module
    (logits,) = graph_module.graph.output_node().args[0]
    model_facts = ModelFacts(
        **facts,
        vocab_size=int(logits.meta["val"].shape[-1]),
        kv_layers=tuple(hooks.kv_layers),
        attention=tuple(hooks.attention),
    )
    constants = name_weights(exported, graph_module, built)
    return CapturedGraph(graph_module, model_facts, constants)


def _dynamic_shapes(planes: list[Tensor]) -> dict[str, Any]:
    tokens = Dim("T", min=1, max=MAX_STEP_TOKENS)
    seqs = Dim("B", min=1, max=4096)
    num_blocks = Dim("NB", min=1, max=1 << 30)
    return {
        "token_ids": {0: tokens},
        "positions": {0: tokens},
        "slot_mapping": {0: tokens},
        "block_tables": {0: seqs, 1: Dim("M", min=1, max=1 << 20)},
        "seq_lens": {0: seqs},
        "query_start": {0: seqs + 1},
        "logit_rows": {0: Dim("R", min=0, max=MAX_STEP_TOKENS)},
        "kv": [{0: num_blocks} for _ in planes],
    }


def export(
    step: nn.Module, args: tuple[Any, ...], dynamic_shapes: dict[str, Any]
) -> torch.export.ExportedProgram:
    """Trace a step around `step.model`. Raises ModelError as the hooks do, CompileError for the rest."""
    try:
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # no stub
            return torch.export.export(step, args, strict=False, dynamic_shapes=dynamic_shapes)
    except ModelError:
        raise
    except Exception as error:  # torch.export raises many kinds; the message is what helps
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModelError):
                raise cause from None
            cause = cause.__cause__
        raise CompileError(
            f"{type(step.model).__name__}: tracing failed: {type(error).__name__}: {str(error)[:2000]}"
        ) from error


def name_weights(
    exported: torch.export.ExportedProgram, gm: fx.GraphModule, built: BuiltModel
) -> dict[str, Tensor]:
    """Give every placeholder its role and every weight its expression; one placeholder per tied tensor."""
    constants: dict[str, Tensor] = {}
    placeholders = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    seen: dict[str, fx.Node] = {}
    for spec in exported.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            node.meta["role"] = "kv" if spec.arg.name.startswith("kv") else "step"
            continue
        target = str(spec.target).removeprefix("model.") if spec.target else ""
        if spec.kind == InputKind.CONSTANT_TENSOR or target in built.constants:
            known = target in built.constants
            value = built.constants[target] if known else exported.constants[str(spec.target)]
            target = f"{CONSTANT}{target}"
            constants[target] = value
        elif target not in built.params and target not in built.tied:
            raise CompileError(
                f"{type(built.model).__name__}: traced tensor {spec.target} is not a parameter"
            )
        target = built.tied.get(target, target)
        if target in seen:
            node.replace_all_uses_with(seen[target])
            gm.graph.erase_node(node)
            continue
        seen[target] = node
        node.meta["role"], node.meta["weight"] = "weight", load(target)
    gm.graph.lint()
    gm.recompile()
    return constants
