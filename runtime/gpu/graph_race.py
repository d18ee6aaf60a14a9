"""Timing on a GPU: work captured as CUDA graphs whose replays take turns.

Launches of a graph cost the host nothing, and graphs that take turns see the same clock and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from ostinato.runtime.gpu.step_graphs import no_collection

RUN_MS = 3.0  # a sample replays a graph for about this long
_BYTES_PER_MS = 4e9  # that an H200 reads; elsewhere a sample takes longer


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all: the library keeps a workspace for each stream."""
    return torch.cuda.Stream()


def new_pool() -> Any:
    """Memory that graphs share whose results nobody reads."""
    return torch.cuda.graph_pool_handle()


def captured(call: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `call` launches, which runs once before. `pool`: of graphs that share their memory.

    `torch.cuda.graph` would collect garbage each time: 0.1 s.
    """
    stream, graph = _capture_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with no_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(RuntimeError):  # it would hide the reason
                    graph.capture_end()
                raise
            graph.capture_end()
    return graph


def race(
    graphs: Sequence[torch.cuda.CUDAGraph], num_bytes: int, rounds: int, run_ms: float = RUN_MS
) -> list[list[float]]:
    """Milliseconds of a replay, `rounds` samples for each graph; they take turns.

    `num_bytes`: that a replay moves; it decides how often a sample replays, so as to take `run_ms`.
    """
    repeats = max(1, round(run_ms * _BYTES_PER_MS / num_bytes))
    took: list[list[float]] = [[] for _ in graphs]
    for turn in range(rounds + 1):
        for graph, samples in zip(graphs, took, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                graph.replay()
            stop.record()
            stop.synchronize()
            if turn:
                samples.append(start.elapsed_time(stop) / repeats)
    return took
