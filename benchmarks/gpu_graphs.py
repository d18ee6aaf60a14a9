"""Timing on a GPU as `runtime/gpu/graph_race.py` does it, and the speed of a copy."""

from __future__ import annotations

import statistics

import torch

from ostinato.runtime.gpu.graph_race import RUN_MS, captured, race

__all__ = ["RUN_MS", "captured", "copy_speed", "race"]


def copy_speed(num_bytes: int = 1 << 30) -> float:
    """TB/s of reading and writing `num_bytes` by a kernel, counting both.

    A copy by the driver, which torch's `copy_` is under a graph, reaches two thirds of it on an H200.
    """
    source, target = (torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda") for _ in range(2))
    source.random_()
    (samples,) = race([captured(lambda: torch.add(source, 1, out=target))], 2 * num_bytes, 7)
    return 2 * num_bytes / statistics.median(samples) / 1e9
