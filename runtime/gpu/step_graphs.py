"""CUDA graphs of whole steps, one per shape: captured once, checked against eager, then replayed.

Shapes ("buckets") are a table made at start: decode steps of 1 to `max_running` sequences, and mixed steps of
up to `gpu.graph_tokens` tokens. A plan runs in the smallest that holds it; a plan that none holds runs
uncaptured through the same program, and the reason is counted. All graphs share one memory pool, and all of
its memory: they never run at the same time, the largest is captured first, and nobody owns what one leaves
behind. Its logits are there until the next replay.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.runtime.memory.window_tensor import window_tensor
from ostinato.runtime.runner import StepShape
from ostinato.runtime.scheduling.plan import Plan

log = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MIXED_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
HOT_DECODE, HOT_MIXED = 64, 256  # captured before the engine says that it is ready; the rest when it idles
OFTEN = 32  # steps without a graph, by which a busy engine has shown that a shape is worth a pause of 50 ms


class Replay(NamedTuple):
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [R, V]; valid until another graph is replayed


class Fit(NamedTuple):
    """How a plan runs: the shape of its inputs, and the captured step, if there is one."""

    shape: StepShape
    replay: Replay | None
    every_wanted: bool  # logits of all rows that the plan wants, not of each sequence's last token


def bucket_shapes(max_running: int, graph_tokens: int) -> list[StepShape]:
    """All shapes in the order of capture: the largest, whose memory has room for all; hot ones; the rest."""
    sizes = [size for size in DECODE_SIZES if size < max_running] + [max_running]
    if sizes[-1] > DECODE_SIZES[-1]:
        sizes = sizes[:-1]  # a larger step is mixed, or runs uncaptured
    decode = [StepShape(size, size, size) for size in sizes if size <= graph_tokens]
    mixed = [
        StepShape(tokens, min(tokens // 2, max_running), min(tokens // 2, max_running))
        for tokens in MIXED_TOKENS  # fewer sequences than tokens: equal numbers mean a decode step
        if tokens <= graph_tokens
    ]
    shapes = sorted(decode + mixed, key=lambda s: (s.logit_rows, s.tokens), reverse=True)
    largest = shapes[:1]
    hot = [s for s in shapes[1:] if _is_hot(s)]
    return largest + hot + [s for s in shapes[1:] if not _is_hot(s)]


def _is_hot(shape: StepShape) -> bool:
    return shape.tokens <= (HOT_DECODE if shape.tokens == shape.sequences else HOT_MIXED)


class StepGraphs:
    """The captured steps of one model. One thread uses it, on the stream that it was made with."""

    def __init__(
        self,
        body: Callable[[StepShape], Tensor],
        prepare: Callable[[StepShape], None],
        shapes: list[StepShape],
        stream: torch.cuda.Stream,
    ) -> None:
        """`body` gives a step's kernels to the current stream and returns the logits; `prepare` puts inputs
        of that shape on the device, for the check.
        """
        self._body, self._prepare, self._stream = body, prepare, stream
        self._waiting = list(shapes)
        self._missed: Counter[StepShape] = Counter()  # steps that ran without the graph of this shape
        self._wanted: StepShape | None = None  # a waiting one that was missed often
        self._captured: dict[StepShape, Replay] = {}
        self._decode = sorted(s for s in shapes if s.tokens == s.sequences)
        self._mixed = sorted(s for s in shapes if s.tokens > s.sequences)
        self._pool = torch.cuda.graph_pool_handle()
        self.eager: Counter[str] = Counter()
        self.replays = 0
        self.seconds, self.bytes = 0.0, 0  # that captures took, of time and of the device's memory

    def fit(self, plan: Plan) -> Fit:
        """Where a plan runs. That it is not replayed is counted in `eager`, by reason."""
        count = len(plan.entries)
        # one token each, and all sampled: the common step, told without looking at each entry's rows
        is_plain = plan.num_tokens == count and all(entry.samples for entry in plan.entries)
        if not is_plain and any(entry.scores_prompt for entry in plan.entries):
            self.eager["prompt_logprobs"] += 1
            rows = sum(entry.num_logit_rows for entry in plan.entries)
            return Fit(StepShape(plan.num_tokens, count, rows), None, True)
        reason = "too_large"
        for shape in self._decode if plan.num_tokens == count else self._mixed:
            if shape.tokens >= plan.num_tokens and shape.sequences >= count:
                replay = self._captured.get(shape)
                if replay is not None:
                    self.replays += 1
                    return Fit(shape, replay, False)
                reason = "not_captured"
                self._missed[shape] += 1
                if self._missed[shape] >= OFTEN and shape in self._waiting:
                    self._wanted = shape
                break
        self.eager[reason] += 1
        return Fit(StepShape(plan.num_tokens, count, count), None, False)

    @property
    def num_captured(self) -> int:
        """Shapes that can be replayed."""
        return len(self._captured)

    def capture_hot(self) -> None:
        """Capture what is needed before the engine is ready: the first shape, and all hot ones behind it."""
        if self.num_captured == 0:
            self.capture_next()
        while self._waiting and _is_hot(self._waiting[0]):
            self.capture_next()

    @property
    def wants_pause(self) -> bool:
        """Whether a shape was missed so often that capturing it cannot wait until the engine idles."""
        return self._wanted is not None

    def capture_next(self) -> bool:
        """Capture the next shape; False when none is left. Costs 10 to 50 ms; nothing may be in flight.

        A shape that was missed often comes before all others.
        When it cannot be, as when memory of the device ends, this shape and all others stay uncaptured.
        """
        if not self._waiting:
            return False
        shape, self._wanted = self._wanted or self._waiting[0], None
        self._waiting.remove(shape)
        began, (free, _) = time.perf_counter(), torch.cuda.mem_get_info()
        try:
            replay = self._capture(shape)
        except RuntimeError as error:
            self._stream.synchronize()  # raises on a device that computes no more
            torch.cuda.empty_cache()
            log.warning(
                "%s cannot be captured (%s): it and %d others run uncaptured, which is slower; where memory "
                "is short, lower gpu.graph_tokens or kv.max_gib",
                shape,
                str(error).partition("\n")[0],
                len(self._waiting),
            )
            self._waiting.clear()
            return False
        if replay is not None:
            self._captured[shape] = replay
        torch.cuda.empty_cache()  # what the uncaptured run left, which is as much as the graphs hold
        self.seconds += time.perf_counter() - began
        self.bytes += max(0, free - torch.cuda.mem_get_info()[0])
        return True

    def clear(self) -> None:
        """Forget every graph; they hold memory and the addresses of KV planes."""
        self._captured.clear()
        self._waiting.clear()
        self._wanted = None

    def _capture(self, shape: StepShape) -> Replay | None:
        self._prepare(shape)
        eager = self._body(shape).clone()  # also loads every kernel: nothing may be loaded in a capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = self._body(shape)
            except BaseException:
                with suppress(RuntimeError):  # it would hide the reason
                    graph.capture_end()
                raise
            graph.capture_end()
        self._prepare(shape)
        graph.replay()
        self._stream.synchronize()
        if torch.equal(logits.view(torch.uint8), eager.view(torch.uint8)):  # by bits: NaN is equal to itself
            return Replay(graph, _unowned(logits, graph))
        off = (logits.float() - eager.float()).abs().max().item()
        log.error("graph of %s differs from eager by %g; steps of this shape run uncaptured", shape, off)
        self.eager["self_check"] += 1
        return None


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: what an object frees as it goes would spoil the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unowned(logits: Tensor, graph: torch.cuda.CUDAGraph) -> Tensor:
    """The same memory, which the pool may give to the next capture. The graph keeps the pool."""
    if not logits.is_cuda or not logits.is_contiguous():
        return logits
    size = logits.numel() * logits.element_size()
    window = window_tensor(logits.data_ptr(), size, logits.device, graph)
    return window.view(logits.dtype).view(logits.shape)
