"""`ostinato bench serve`: load a server and measure latency and throughput. Metrics: docs/bench.md."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ostinato.bench.data_settings import DataSettings
from ostinato.bench.load import LoadSettings
from ostinato.bench.plots import need_matplotlib, plot_run
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.results import OutputSettings, make_result, save_result
from ostinato.bench.summary import SummarySettings
from ostinato.bench.sweep import Point, Watcher, run_sweep
from ostinato.bench.target import TargetSettings
from ostinato.tools.bench_flags import add_section, read_section
from ostinato.tools.bench_report import print_points

SECTIONS = (TargetSettings, DataSettings, LoadSettings, SummarySettings, OutputSettings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for section in SECTIONS:
        add_section(parser, section)


def run(arguments: argparse.Namespace) -> int:
    key, profile_key = (os.environ.get(name, "") for name in ("OPENAI_API_KEY", "OSTINATO_ADMIN_KEY"))
    target = read_section(arguments, TargetSettings, api_key=key, profile_key=profile_key)
    data = read_section(arguments, DataSettings)
    load = read_section(arguments, LoadSettings)
    summary = read_section(arguments, SummarySettings)
    output = read_section(arguments, OutputSettings)
    if output.plot:
        need_matplotlib()
    watcher = _Bar(output)
    with watcher.bar:
        model, points = asyncio.run(
            run_sweep(target, data, load, summary, watcher=watcher, save_requests=output.save_requests)
        )
    target = target.model_copy(update={"model": model, "api_key": "", "profile_key": "", "headers": ()})
    settings = {
        "target": target.model_dump(),
        "data": data.model_dump(),
        "load": load.model_dump(),
        "summary": summary.model_dump(),
    }
    save_result(make_result("serve", settings, points, output), output)
    print_points(points)
    for picture in watcher.pictures:
        print(f"written: {picture}", file=sys.stderr)
    return 1 if any(run["completed"] == 0 for point in points for run in point["runs"]) else 0


class _Bar(Watcher):
    """A bar per run on stderr, and the pictures of each."""

    def __init__(self, output: OutputSettings) -> None:
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            console=console,
            disable=not (console.is_terminal if output.progress is None else output.progress),
            refresh_per_second=4,  # the client's cores have better things to do
        )
        self.pictures: list[Path] = []
        self._plot = Path(output.plot).expanduser() if output.plot else None
        self._task = self.bar.add_task("waiting for the server", total=None, tokens=0)
        self._tokens = 0

    def begin(self, title: str, requests: int) -> None:
        self._tokens = 0
        self.bar.reset(self._task, description=title, total=requests, tokens=0)

    def advance(self, requests: int, tokens: int) -> None:
        self._tokens += tokens
        self.bar.update(self._task, advance=requests, tokens=self._tokens)

    def end(self, point: Point, run: int, records: list[RequestRecord]) -> None:
        if self._plot is not None:
            self.pictures += plot_run(records, self._plot, f"{point.name}-run-{run + 1}")
