"""Timing on a GPU: work captured as CUDA graphs whose replays take turns, and the speed of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache

import torch

RUN_MS = 3.0  # a sample replays a graph for about this long


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all: the library keeps a workspace for each stream."""
    return torch.cuda.Stream()


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `call` launches. `torch.cuda.graph` would collect garbage each time: 0.1 s."""
    stream, graph = _capture_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    return graph


def race(graphs: Sequence[torch.cuda.CUDAGraph], num_bytes: int, rounds: int) -> list[list[float]]:
    """Milliseconds of a replay, `rounds` samples for each graph; they take turns."""
    repeats = max(1, round(RUN_MS * 4e9 / num_bytes))
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


def copy_speed(num_bytes: int = 1 << 30) -> float:
    """TB/s of reading and writing `num_bytes` by a kernel, counting both.

    A copy by the driver, which torch's `copy_` is under a graph, reaches two thirds of it on an H200.
    """
    source, target = (torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda") for _ in range(2))
    source.random_()
    (samples,) = race([captured(lambda: torch.add(source, 1, out=target))], 2 * num_bytes, 7)
    return 2 * num_bytes / statistics.median(samples) / 1e9
