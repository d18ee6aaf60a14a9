"""The attention of one model measured on the GPU that compiles it: which kernels each class of step gets.

What a model asks for is known once its program has run dry (`attention_choice.Asked`). Where there is more
than one way, a step of each class is made, over KV blocks that are not in L2; each way is checked on some of
its rows against the op's reference in float64, and captured as a chain of launches. The graphs take turns.
What the op's own rule says stays unless another of our kernels is faster by more than noise, and so does the
best of ours against a library: an artifact that needs no package is worth that much.
Nothing here fails a compile: a way that fails or is wrong is left out, with a warning that says why.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops import attention_choice, fa3_attention, paged_attention, wgmma_prefill
from ostinato.ops.attention_choice import Asked, Attention, Measured, StepClass, Way
from ostinato.ops.kernel_store import STORE
from ostinato.runtime.gpu.graph_race import captured, race

log = logging.getLogger(__name__)

MARGIN = 1.03  # as many times as fast must another way be: machines of one kind differ by more
CONTEXT = 1024  # keys of a sequence of which one token is new
PROMPT = 1024  # most new tokens of one sequence in a step of several
NUM_DECODES = 32  # sequences of one token in such a step
CAPTURED = 1024  # tokens up to which a step has room for more sequences than it holds, as gpu.graph_tokens
SPARE = 8  # rows of such a step that no sequence has
_ROUNDS, _SAMPLE_MS = 5, 2.0
_CHAIN_BYTES, _MOST_BYTES = 4 * (60 << 20), 1 << 30  # of keys and values: of all layers, of a plane at most
_MOST_LAYERS = 8
_ROWS, _SEQUENCES = 16, 4  # that are checked: the last rows of some sequences
_FAILURES = (EngineError, RuntimeError, ValueError)  # torch's errors are RuntimeErrors


class Lengths(NamedTuple):
    """Of the sequences of a step."""

    total: list[int]
    new: list[int]
    num_tokens: int  # rows of q


class Step(NamedTuple):
    """Operands of paged_attention, with the planes of several layers."""

    q: Tensor
    planes: list[tuple[Tensor, Tensor]]
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    scale: float

    def run(self, way: Way, layer: int = 0) -> Tensor:
        """Attention of one layer."""
        index = self.tables, self.lengths, self.starts
        return paged_attention._launch(
            self.q, *self.planes[layer], *index, self.scale, 0, 0.0, choices=_Always(way)
        )

    def run_all(self, way: Way) -> None:
        """Of all layers."""
        for layer in range(len(self.planes)):
            self.run(way, layer)


class _Always(dict[StepClass, Way]):
    """A table that has one way for every step."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self._way = way

    def get(self, key: StepClass, default: Any = None) -> Any:
        return self._way


def measure(choices: Asked, *, window: int, device: torch.device) -> list[Measured]:
    """Choose for all that was asked, and put it into `choices`. `window`: tokens of a longest sequence."""
    began = time.perf_counter()
    measured: list[Measured] = []
    with torch.inference_mode(), STORE.recording():  # it may compile, also in a process that serves
        for attention in sorted(choices.attentions):
            try:
                ways = candidates(attention, device)
            except _FAILURES as error:
                log.warning("attention of %s is not measured: %s", _heads(attention), _said(error))
                continue
            for step_class in classes(attention, ways, window):
                one = _measure(step_class, ways, window, device)
                if one is not None:
                    measured.append(one)
                torch.cuda.empty_cache()
    choices.update({one.step: one.way for one in measured})
    if measured:
        won = [f"{way} {sum(one.way == way for one in measured)}" for way in attention_choice.WAYS]
        seconds = time.perf_counter() - began
        log.info(
            "attention: %d classes of steps measured in %.1f s (%s)", len(measured), seconds, ", ".join(won)
        )
    return measured


def candidates(attention: Attention, device: torch.device) -> list[Way]:
    """The ways that there are for prefill; those for decode are the same, without "wgmma"."""
    if attention.window or attention.softcap or attention.has_sinks:
        return ["triton"]
    dtype = getattr(torch, attention.dtype)
    plane = torch.empty(1, attention.block_tokens, attention.kv_heads, attention.k_size, device=device).to(
        dtype
    )
    values = plane.new_empty(*plane.shape[:3], attention.v_size)
    q = plane.new_empty(wgmma_prefill.MIN_TOKENS, attention.heads, attention.k_size)
    operands = q, plane, values, 0, 0.0, None
    ways: list[Way] = ["triton"]
    if wgmma_prefill.can_launch(*operands):
        ways.append("wgmma")
    if fa3_attention.installed_version() and fa3_attention.refusal(*operands) is None:
        if (reason := fa3_attention.unavailable_reason()) is None:
            ways.append("fa3")
        else:
            log.warning("attention runs by our own kernels: %s", reason)
    return ways


def classes(attention: Attention, ways: list[Way], window: int) -> list[StepClass]:
    """Those that have several of the ways, and that a model of this window can form."""
    found: list[StepClass] = []
    if len(ways) > 1:
        sizes = attention_choice.PREFILL
        lone = [tokens for below, tokens in pairwise((0, *sizes)) if below < window]
        found += [StepClass(attention, "lone", tokens) for tokens in lone]
        found += [StepClass(attention, "mixed", tokens) for tokens in sizes]
    if "fa3" in ways:
        found += [StepClass(attention, "decode", tokens) for tokens in attention_choice.DECODE]
    return found


def lengths_of(step_class: StepClass, window: int) -> Lengths:
    """A step as servers form them: a prompt; a token of each of many sequences; prompts and such tokens."""
    tokens, context = step_class.tokens, min(CONTEXT, window)
    if step_class.kind == "lone":
        tokens = min(tokens, window)
        return Lengths([tokens], [tokens], tokens)
    if step_class.kind == "decode":
        return Lengths([context] * tokens, [1] * tokens, tokens)
    spare = SPARE if tokens <= CAPTURED else 0
    left, most = tokens - spare - NUM_DECODES, min(PROMPT, window)
    prompts = [most] * (left // most) + [left % most] * (left % most > 0)
    num_empty = max(0, tokens // 2 - len(prompts) - NUM_DECODES) if tokens <= CAPTURED else 0
    total = prompts + [context] * NUM_DECODES + [0] * num_empty
    return Lengths(total, prompts + [1] * NUM_DECODES + [0] * num_empty, tokens)


def choose(us: Mapping[Way, float], default: Way) -> Way:
    """The default; another of ours that is faster by more than noise; a library, if it is by as much."""
    ours = {way: took for way, took in us.items() if way != "fa3"}
    if not ours:
        return "fa3"
    best = min(ours, key=lambda way: ours[way])
    if MARGIN * us.get("fa3", float("inf")) < ours[best]:
        return "fa3"
    return default if default in ours and ours[default] <= MARGIN * ours[best] else best


def _measure(step_class: StepClass, ways: list[Way], window: int, device: torch.device) -> Measured | None:
    """None: it could not be, and the rule decides."""
    is_decode = step_class.kind == "decode"
    graphs: dict[Way, torch.cuda.CUDAGraph] = {}
    try:
        step = make_step(step_class.attention, lengths_of(step_class, window), window, device)
        right = _truth(step)
        for way in ways:
            if is_decode and way == "wgmma":
                continue
            try:
                if (reason := wrong(step, way, right)) is not None:
                    raise ValueError(reason)
                graphs[way] = captured(lambda: step.run_all(way))  # noqa: B023  # called at once
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # errors of Triton's compiler have no other base
                log.warning("%s is left out for %s: %s", way, _told(step_class), _said(error))
        if not graphs:
            return None
        took = race([*graphs.values()], None, _ROUNDS, _SAMPLE_MS)
    except _FAILURES as error:
        log.warning("attention of %s is not measured: %s", _told(step_class), _said(error))
        return None
    layers = len(step.planes)
    us = {way: statistics.median(some) * 1e3 / layers for way, some in zip(graphs, took, strict=True)}
    default: Way = "wgmma" if "wgmma" in ways and not is_decode else "triton"
    return Measured(step_class, choose(us, default), {way: round(some, 2) for way, some in us.items()})


def make_step(attention: Attention, lengths: Lengths, window: int, device: torch.device) -> Step:
    """Random numbers in blocks that lie anywhere; those of a large step are shared by sequences."""
    draw = torch.Generator(device).manual_seed(0)
    dtype, block = getattr(torch, attention.dtype), attention.block_tokens
    sizes = attention.k_size, attention.v_size
    block_bytes = block * attention.kv_heads * sum(sizes) * dtype.itemsize
    counts = [-(-length // block) for length in lengths.total]
    num_blocks = max(1, min(sum(counts), _MOST_BYTES // block_bytes))
    num_layers = min(max(1, -(-_CHAIN_BYTES // (num_blocks * block_bytes))), _MOST_LAYERS)

    def plane(size: int) -> Tensor:
        shape = num_blocks, block, attention.kv_heads, size
        return torch.randn(shape, generator=draw, device=device, dtype=dtype)

    order = torch.randperm(sum(counts), generator=draw, device=device).int() % num_blocks
    width = max(-(-window // block), *counts)  # it decides how a kernel splits keys
    tables = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
    for row, (count, stop) in enumerate(zip(counts, accumulate(counts), strict=True)):
        tables[row, :count] = order[stop - count : stop]
    q_shape = lengths.num_tokens, attention.heads, attention.k_size
    return Step(
        torch.randn(q_shape, generator=draw, device=device, dtype=dtype),
        [(plane(sizes[0]), plane(sizes[1])) for _ in range(num_layers)],
        tables,
        torch.tensor(lengths.total, dtype=torch.int32, device=device),
        torch.tensor([0, *accumulate(lengths.new)], dtype=torch.int32, device=device),
        attention.k_size**-0.5,
    )


class _Sample(NamedTuple):
    """Some rows of a step's output: the last of some sequences."""

    rows: Tensor
    truth: Tensor
    budget: float  # of the largest error


def _truth(step: Step) -> _Sample:
    """By the reference: only the last tokens of a sequence are new to it, which changes nothing of theirs."""
    totals, starts = step.lengths.tolist(), step.starts.tolist()
    live = [row for row, total in enumerate(totals) if total]
    some = sorted({live[at * (len(live) - 1) // max(1, _SEQUENCES - 1)] for at in range(_SEQUENCES)})
    block = step.planes[0][0].shape[1]
    counts = [-(-totals[row] // block) for row in some]
    blocks = torch.cat([step.tables[row, :count] for row, count in zip(some, counts, strict=True)]).long()
    tables = torch.zeros(len(some), max(counts), dtype=torch.int32)
    for row, (count, stop) in enumerate(zip(counts, accumulate(counts), strict=True)):
        tables[row, :count] = torch.arange(stop - count, stop)
    new = [min(starts[row + 1] - starts[row], _ROWS) for row in some]
    rows = torch.cat(
        [torch.arange(starts[row + 1] - n, starts[row + 1]) for row, n in zip(some, new, strict=True)]
    )
    lengths = torch.tensor([totals[row] for row in some])
    q, k, v = step.q[rows.to(step.q.device)], *(plane[blocks] for plane in step.planes[0])
    index = tables.to(step.q.device), lengths, torch.tensor([0, *accumulate(new)]), step.scale, 0, 0.0

    def reference(dtype: torch.dtype) -> Tensor:
        return paged_attention.paged_attention_reference(q.to(dtype), k.to(dtype), v.to(dtype), *index)

    truth = reference(torch.float64)
    plain_error = float((reference(step.q.dtype).double() - truth).abs().max())
    largest = float(truth.abs().max())
    return _Sample(rows, truth, 2 * (plain_error + torch.finfo(step.q.dtype).eps * largest))


def wrong(step: Step, way: Way, right: _Sample) -> str | None:
    """What is wrong with a way's output, which is likely to lie where NaN was."""
    shape = *step.q.shape[:2], step.planes[0][1].shape[3]
    torch.full(shape, float("nan"), dtype=step.q.dtype, device=step.q.device)
    out = step.run(way)
    error = float((out[right.rows.to(out.device)].double() - right.truth).abs().max())
    if not error <= right.budget:
        return f"its error is {error:.3g}, and {right.budget:.3g} is allowed"
    if bool(out[int(step.starts[-1]) :].any()):
        return "rows past the last sequence are not zero"
    return None


def _told(step_class: StepClass) -> str:
    return f"{step_class.kind} steps of {step_class.tokens} tokens, {_heads(step_class.attention)}"


def _heads(attention: Attention) -> str:
    return f"{attention.heads}/{attention.kv_heads} heads of {attention.k_size}"


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
