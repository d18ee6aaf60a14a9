"""What the load tools print: a table per point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.bench.compare import point_name

_COUNTS = (
    ("completed", "requests answered", ""),
    ("failed", "requests failed", ""),
    ("load_s", "loading", "s"),
    ("duration_s", "duration", "s"),
    ("request_per_s", "requests", "/s"),
    ("input_per_s", "texts embedded or ranked", "/s"),
    ("output_tok_s", "output tokens", "/s"),
    ("total_tok_s", "all tokens", "/s"),
    ("peak_output_tok_s", "peak output tokens", "/s"),
    ("steady.output_tok_s", "output tokens in steady state", "/s"),
    ("steady.request_per_s", "requests in steady state", "/s"),
    ("mean_concurrency", "mean concurrency", ""),
    ("peak_concurrency", "peak concurrency", ""),
    ("cached_fraction", "prompt tokens from the cache", ""),
    ("goodput_per_s", "goodput", "/s"),
    ("goodput_fraction", "requests within all limits", ""),
)
_LATENCIES = (
    ("ttft_ms", "time to first token, ms"),
    ("content_ttft_ms", "time to first content, ms"),
    ("tpot_ms", "time per output token, ms"),
    ("itl_ms", "gap between chunks, ms"),
    ("latency_ms", "latency, ms"),
    ("start_delay_ms", "sent later than due, ms"),
)


def print_points(points: Sequence[Mapping[str, Any]]) -> None:
    """Means over the runs; with several runs each has its 95 % interval."""
    for point in points:
        numbers = point["over_runs"]
        runs = len(point["runs"])
        print(f"\n{point_name(point)}" + (f", {runs} runs, mean ± 95 % interval" if runs > 1 else ""))
        for name, words, unit in _COUNTS:
            if name in numbers:
                print(f"  {words:32} {shown(numbers[name])} {unit}".rstrip())
        heads = [key.split(".")[1] for key in numbers if key.startswith("latency_ms.")]
        if heads:
            print(f"  {'':32} " + " ".join(f"{head:>{_width(runs)}}" for head in heads))
        for name, words in _LATENCIES:
            if f"{name}.mean" in numbers:
                cells = (f"{shown(numbers[f'{name}.{head}']):>{_width(runs)}}" for head in heads)
                print(f"  {words:32} " + " ".join(cells))
        sources = {source for run in point["runs"] for source in run.get("output_tokens_from", {})}
        if "chunks" in sources:
            print("  the server sent no usage: a chunk counts as one token, so token counts are too low")
        for run in point["runs"]:
            for error, count in run["errors"].items():
                print(f"  {count} x {error}")


def shown(number: Mapping[str, float | None]) -> str:
    """`12.3` or `12.3 ± 0.4`."""
    text = plain(number["mean"])
    return text if number["ci95"] is None else f"{text} ± {number['ci95']:.2g}"


def plain(value: float | None) -> str:
    """At most four digits, or all of a whole number."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _width(runs: int) -> int:
    return 8 if runs == 1 else 16
