"""Several runs of one point: means and 95 % confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Student's t, two-sided 95 %, by degrees of freedom from 1.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
)
_T95_LATER = ((20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980))


def flat(summary: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a summary by dotted name; those that do not exist are left out."""
    out: dict[str, float] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[prefix + name] = float(value)
    return out


def over_runs(summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """{"ttft_ms.p50": {"mean": 3.1, "ci95": 0.2}}: `ci95` is the half width, None for a single run."""
    runs = [flat(summary) for summary in summaries]
    names = [name for name in runs[0] if not name.startswith("errors.") and all(name in run for run in runs)]
    return {name: _interval([run[name] for run in runs]) for name in names}


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "ci95": None}
    return {"mean": mean, "ci95": t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))}


def t95(degrees: int) -> float:
    """Student's t; between the table's rows the larger one, so that an interval is never too narrow."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    rows = [(len(_T95), _T95[-1]), *_T95_LATER]
    return next(t for least, t in reversed(rows) if degrees >= least)
