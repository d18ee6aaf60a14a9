"""Pictures of a run, as PNG. Needs matplotlib, the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.bench.request_record import RequestRecord
from ostinato.bench.summary import concurrency_steps
from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120
_MOST_BARS = 2000  # requests in the timeline; more would be less than a pixel each


def need_matplotlib() -> None:
    """ConfigError when pictures cannot be made; ask before a long run."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'ostinato[bench]', or leave --plot out"
        ) from None


def plot_run(records: Sequence[RequestRecord], folder: Path, name: str) -> list[Path]:
    """Write `NAME-latency.png` and `NAME-timeline.png`; return their paths."""
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for kind, draw in (("latency", _latency), ("timeline", _timeline)):
        path = folder / f"{name}-{kind}.png"
        draw(records).savefig(path, dpi=_DPI)
        made.append(path)
    return made


def _figure(**more: Any) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    return Figure(layout="constrained", **more)


def _latency(records: Sequence[RequestRecord]) -> Figure:
    """Cumulative distributions: the share of requests at or below each latency."""
    done = [record for record in records if record.ok]
    numbers: dict[str, list[float]] = {
        "time to first token, ms": [r.first_token_at * 1e3 for r in done if r.first_token_at is not None],
        "time per output token, ms": [tpot * 1e3 for r in done if (tpot := r.tpot_s) is not None],
        "gap between chunks, ms": [gap * 1e3 for r in done for gap in r.itl_s],
        "latency, ms": [r.end_at * 1e3 for r in done],
    }
    figure = _figure(figsize=(10, 6.5))
    for axes, (title, values) in zip(figure.subplots(2, 2).flat, numbers.items(), strict=True):
        axes.set(xlabel=title, ylabel="share at or below", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        if not values:
            axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
            continue
        ordered = np.sort(values)
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
        for share in (50, 99):
            at = float(np.percentile(ordered, share))
            axes.axvline(at, color="tab:red", linestyle=":", linewidth=1)
            axes.annotate(
                f"p{share} {at:.3g}",
                (at, share / 100),
                xytext=(-4, -10),
                textcoords="offset points",
                ha="right",
            )
    return figure


def _timeline(records: Sequence[RequestRecord]) -> Figure:
    """A bar per request (waiting for the first token, then receiving), and what ran and came over time."""
    figure = _figure(figsize=(10, 8))
    bars, running, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    shown = sorted(records, key=lambda r: r.start_s)[:_MOST_BARS]
    for color, label, parts in (
        ("tab:orange", "to first token", [(r.start_s, r.first_token_at or r.end_at) for r in shown]),
        (
            "tab:blue",
            "receiving",
            [(r.start_s + f, r.end_at - f) for r in shown for f in [r.first_token_at or r.end_at]],
        ),
    ):
        starts, widths = zip(*parts, strict=True) if parts else ((), ())
        bars.barh(range(len(parts)), widths, left=starts, height=1.0, color=color, label=label)
    failed = [(at, r.end_s) for at, r in enumerate(shown) if not r.ok]
    if failed:
        bars.plot([end for _, end in failed], [at for at, _ in failed], "rx", label="failed")
    bars.set(ylabel=f"request{'' if len(shown) == len(records) else f' (first {_MOST_BARS})'}")
    bars.legend(loc="lower right")
    steps = concurrency_steps(records)
    running.step([at for at, _ in steps], [count for _, count in steps], where="post")
    running.set(ylabel="running", ylim=(0, None))
    times, weights = [], []
    for record in records:
        if record.ok and record.token_times_at:
            each = (record.output_tokens or 0) / len(record.token_times_at)
            times += [record.start_s + at for at in record.token_times_at]
            weights += [each] * len(record.token_times_at)
    if times:
        width = max(max(times) / 100, 1e-3)
        edges = np.arange(0, max(times) + 2 * width, width)
        counts, _ = np.histogram(times, edges, weights=weights)
        rate.step(edges[:-1], counts / width, where="post")
    rate.set(xlabel="seconds from the start", ylabel="output tokens/s", ylim=(0, None))
    return figure
