"""Two results side by side: which numbers changed, and by more than they vary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ostinato.errors import ConfigError

# Name of a number, and whether more of it is better. What a result lacks is left out.
NUMBERS: dict[str, bool] = {
    "request_per_s": True,
    "input_per_s": True,
    "output_tok_s": True,
    "total_tok_s": True,
    "goodput_per_s": True,
    "steady.output_tok_s": True,
    "ttft_ms.mean": False,
    "ttft_ms.p50": False,
    "ttft_ms.p99": False,
    "tpot_ms.mean": False,
    "tpot_ms.p50": False,
    "tpot_ms.p99": False,
    "itl_ms.p50": False,
    "itl_ms.p99": False,
    "latency_ms.mean": False,
    "latency_ms.p50": False,
    "latency_ms.p99": False,
    "failed": False,
    "load_s": False,
    "ready_s": False,
    "first_token_s": False,
    "total_s": False,
}


class Change(NamedTuple):
    """One number of one point in both results. `verdict`: better, worse, same or ? (one run: unknown)."""

    point: str
    number: str
    before: float
    after: float
    ratio: float | None
    verdict: str


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Changes of all numbers of the points that both have. ConfigError when there is no such point."""
    if before["kind"] != after["kind"]:
        raise ConfigError(
            f"a result of bench {before['kind']} and one of bench {after['kind']} do not compare"
        )
    points = {point_name(point): point for point in before["points"]}
    pairs = [(name, points[name], two) for two in after["points"] if (name := point_name(two)) in points]
    if not pairs:
        theirs = ", ".join(point_name(point) for point in after["points"])
        raise ConfigError(f"no point in common: the first has {', '.join(points)}; the second has {theirs}")
    changes = []
    for name, one, two in pairs:
        for number, more_is_better in NUMBERS.items():
            if number in one["over_runs"] and number in two["over_runs"]:
                changes.append(
                    _change(name, number, one["over_runs"][number], two["over_runs"][number], more_is_better)
                )
    return changes


def point_name(point: Mapping[str, Any]) -> str:
    """What tells the points of a sweep apart."""
    parts = [f"{name}={point[name]}" for name in ("request_rate", "max_concurrency") if name in point]
    return " ".join(parts) or "all"


def _change(
    point: str, number: str, one: Mapping[str, Any], two: Mapping[str, Any], more_is_better: bool
) -> Change:
    before, after = one["mean"], two["mean"]
    ratio = after / before if before else None
    if before == after:
        verdict = "same"
    elif one["ci95"] is None or two["ci95"] is None:
        verdict = "?"
    elif abs(after - before) <= one["ci95"] + two["ci95"]:
        verdict = "same"
    else:
        verdict = "better" if (after > before) == more_is_better else "worse"
    return Change(point, number, before, after, ratio, verdict)


def regressions(changes: list[Change], percent: float) -> list[Change]:
    """Those that are worse by more than `percent`, whether or not the runs tell how much they vary."""
    return [
        change
        for change in changes
        if change.ratio is not None
        and change.verdict in ("worse", "?")
        and (1 - change.ratio if NUMBERS[change.number] else change.ratio - 1) * 100 > percent
    ]
