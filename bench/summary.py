"""From records to the numbers of a run. docs/bench.md defines each; a number that does not exist is None."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ostinato.bench.request_record import RequestRecord
from ostinato.errors import ConfigError
from ostinato.section import Section

_SLO_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "latency": "latency", "e2el": "latency"}


class SummarySettings(Section):
    """What is made of the records."""

    percentiles: tuple[Annotated[float, Field(ge=0, le=100)], ...] = Field(
        (50, 90, 95, 99), description="of each latency, 0 to 100"
    )
    goodput: tuple[str, ...] = Field(
        (), description="limits in ms, as ttft:500 tpot:50 itl:100 latency:5000: counts requests within all"
    )
    steady_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="steady state: first to last moment with this share of the peak concurrency",
    )


def read_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`ttft:500` as {"ttft": 0.5}, in seconds. ConfigError names what is wrong."""
    read: dict[str, float] = {}
    for given in limits:
        name, _, value = given.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in _SLO_NAMES or not limit > 0:
            raise ConfigError(f"--goodput {given!r}: must be NAME:MILLISECONDS with {', '.join(_SLO_NAMES)}")
        read[_SLO_NAMES[name]] = limit / 1000
    return read


def summarize(records: Sequence[RequestRecord], settings: SummarySettings) -> dict[str, Any]:
    """All numbers of one run, as JSON."""
    done = [record for record in records if record.ok]
    start = min((record.start_s for record in records), default=0.0)
    duration = max((record.end_s for record in records), default=0.0) - start
    output = sum(record.output_tokens or 0 for record in done)
    prompt = sum(record.prompt_tokens or 0 for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    inputs = [record.inputs for record in done if record.inputs is not None]
    busy_s = sum(record.end_at for record in records)
    limits = read_goodput(settings.goodput)
    good = sum(1 for record in done if _within(record, limits))
    return {
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": dict(Counter(record.error for record in records if not record.ok).most_common(10)),
        "duration_s": duration,
        "request_per_s": _ratio(len(done), duration),
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "cached_fraction": _ratio(sum(cached), prompt) if cached else None,
        "inputs": sum(inputs) if inputs else None,
        "input_per_s": _ratio(sum(inputs), duration) if inputs else None,
        "output_tokens": output,
        "output_tokens_from": dict(Counter(r.output_tokens_from for r in done if r.output_tokens_from)),
        "output_tok_s": None if inputs else _ratio(output, duration),
        "total_tok_s": _ratio(prompt + output, duration),
        "peak_output_tok_s": _peak_rate(done, start),
        "mean_concurrency": _ratio(busy_s, duration),
        "peak_concurrency": max((running for _, running in concurrency_steps(records)), default=0),
        "goodput_per_s": _ratio(good, duration) if limits else None,
        "goodput_fraction": _ratio(good, len(records)) if limits else None,
        **_latencies(done, settings.percentiles),
        "start_delay_ms": _spread([r.start_s - r.planned_s for r in records], settings.percentiles),
        "steady": _steady(records, settings),
    }


def concurrency_steps(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """(moment, requests running from there on), in order of time."""
    changes = sorted([(r.start_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    running, steps = 0, []
    for at, change in changes:
        running += change
        steps.append((at, running))
    return steps


def _latencies(done: Sequence[RequestRecord], percentiles: Sequence[float]) -> dict[str, Any]:
    return {
        "ttft_ms": _spread([r.first_token_at for r in done], percentiles),
        "content_ttft_ms": _spread([r.first_content_at for r in done], percentiles),
        "tpot_ms": _spread([r.tpot_s for r in done], percentiles),
        "itl_ms": _spread([gap for r in done for gap in r.itl_s], percentiles),
        "latency_ms": _spread([r.end_at for r in done], percentiles),
    }


def _spread(seconds: Sequence[float | None], percentiles: Sequence[float]) -> dict[str, float] | None:
    """Mean and so on in ms, of those that exist; None if none does."""
    values = np.array([value for value in seconds if value is not None]) * 1000
    if not len(values):
        return None
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        **{f"p{share:g}": float(np.percentile(values, share)) for share in percentiles},
    }


def _steady(records: Sequence[RequestRecord], settings: SummarySettings) -> dict[str, Any] | None:
    """The same numbers without ramp-up and wind-down; None when the window has no length."""
    steps = concurrency_steps(records)
    enough = settings.steady_fraction * max((running for _, running in steps), default=0)
    full = [at for at, running in enumerate(steps) if running[1] >= enough]
    if not full or full[-1] + 1 >= len(steps):
        return None
    begin, end = steps[full[0]][0], steps[full[-1] + 1][0]
    inside = [r for r in records if r.ok and begin <= r.end_s <= end]
    tokens, generates = 0.0, all(record.inputs is None for record in records)
    for record in records:
        if record.ok and record.token_times_at:
            each = (record.output_tokens or 0) / len(record.token_times_at)
            tokens += each * sum(begin <= record.start_s + at <= end for at in record.token_times_at)
    if end <= begin:
        return None
    return {
        "begin_s": begin,
        "end_s": end,
        "completed": len(inside),
        "request_per_s": _ratio(len(inside), end - begin),
        "output_tok_s": _ratio(tokens, end - begin) if generates else None,
        **_latencies(inside, settings.percentiles),
    }


def _within(record: RequestRecord, limits: dict[str, float]) -> bool:
    """A number that a request does not have breaks no limit; of its gaps the mean counts."""
    gaps = record.itl_s
    numbers = {
        "ttft": record.first_token_at,
        "tpot": record.tpot_s,
        "itl": sum(gaps) / len(gaps) if gaps else None,
        "latency": record.end_at,
    }
    return all((numbers[name] or 0.0) <= limit for name, limit in limits.items())


def _peak_rate(done: Sequence[RequestRecord], start: float) -> float | None:
    """Most output tokens in a second of the clock; the tokens of a request are spread over its chunks."""
    seconds: dict[int, float] = {}
    for record in done:
        if record.token_times_at:
            each = (record.output_tokens or 0) / len(record.token_times_at)
            for at in record.token_times_at:
                second = math.floor(record.start_s + at - start)
                seconds[second] = seconds.get(second, 0.0) + each
    return max(seconds.values()) if seconds else None


def _ratio(value: float, by: float) -> float | None:
    return value / by if by > 0 else None
