"""A progress bar for compiles: one line on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ostinato.runtime.compile import STAGES
from ostinato.runtime.compile import Progress as Report

_WORDS = {
    "read": "reading the model",
    "trace": "tracing transformers' definition",
    "passes": "fusing",
    "kernels": "compiling kernels",
    "weights": "packing weights",
    "proof": "proving numerics",
    "write": "writing the artifact",
}


@contextmanager
def compile_progress(title: str) -> Iterator[Report]:
    """Give a callback for `compile_model(progress=...)`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(console, title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"compiling {title}", total=len(STAGES), stage="")

        def report(stage: str, share: float) -> None:
            bar.update(task, completed=STAGES.index(stage) + min(share, 1.0), stage=_WORDS[stage])

        yield report


def _plain(console: Console, title: str) -> Report:
    started: dict[str, float] = {}

    def report(stage: str, share: float) -> None:
        if stage not in started:
            started[stage] = time.perf_counter()
        if share >= 1.0 and started[stage] >= 0:
            seconds = time.perf_counter() - started[stage]
            started[stage] = -1.0
            console.print(f"compiling {title}: {_WORDS[stage]}, {seconds:.1f} s", highlight=False, soft_wrap=True)

    return report
