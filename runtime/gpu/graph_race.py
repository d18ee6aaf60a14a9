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
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all of a device: the library keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


def new_pool() -> Any:
    """Memory that graphs share whose results nobody reads."""
    return torch.cuda.graph_pool_handle()


def captured(call: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `call` launches, which runs once before. `pool`: of graphs that share their memory.

    `torch.cuda.graph` would collect garbage each time: 0.1 s.
    """
    stream, graph = _capture_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
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
    graphs: Sequence[torch.cuda.CUDAGraph], num_bytes: int | None, rounds: int, run_ms: float = RUN_MS
) -> list[list[float]]:
    """Milliseconds of a replay, `rounds` samples for each graph; they take turns.

    `num_bytes`: that a replay moves; it decides how often a sample replays, so as to take `run_ms`. None: a
    replay of the first graph shows it, where other things than bytes may take the time.
    """
    if not graphs:
        return []
    expected_ms = _took(graphs[0], 1) if num_bytes is None else num_bytes / _BYTES_PER_MS
    repeats = max(1, round(run_ms / expected_ms))
    samples: list[list[float]] = [[] for _ in graphs]
    for turn in range(rounds + 1):
        for graph, some in zip(graphs, samples, strict=True):
            took = _took(graph, repeats)
            if turn:
                some.append(took)
    return samples


def _took(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Milliseconds of a replay, of so many."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats
