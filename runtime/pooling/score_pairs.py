"""Pairs of texts to score, and the scores that vectors give. The same over HTTP and in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pairs_of(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """One `first` is paired with each of `second`; else there are as many."""
    return list(zip(first if len(first) == len(second) else [*first] * len(second), second, strict=True))


def cosines(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> list[float]:
    """Of the angles between vectors of length 1 (to seven digits: float32), paired as by `pairs_of`."""
    left = first if len(first) == len(second) else [*first] * len(second)
    dots = (math.fsum(a * b for a, b in zip(*pair, strict=True)) for pair in zip(left, second, strict=True))
    return [min(1.0, max(-1.0, dot)) for dot in dots]
