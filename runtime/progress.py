"""Progress bars on stderr: one line on a terminal; elsewhere one line per stage of a compile, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ostinato.runtime.compile_stages import STAGES
from ostinato.runtime.compile_stages import Progress as Report

_WORDS = {
    "read": "reading the model",
    "trace": "tracing transformers' definition",
    "passes": "fusing",
    "kernels": "waiting for the kernels' compiler",
    "weights": "packing weights",
    "proof": "proving numerics",
    "write": "writing the artifact",
}


@contextmanager
def compile_progress(title: str, *, show: bool | None = None) -> Iterator[Report]:
    """Give a callback for `compile_model(progress=...)`. Nothing is shown before its first call.

    `show` forces the bar on or everything off; None: a bar on a terminal, plain lines elsewhere.
    """
    console = Console(stderr=True)
    if show is False:
        yield lambda stage, share: None
    elif not (show or console.is_terminal):
        yield _plain(console, title)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
        )
        bar = Progress(*columns, console=console, transient=True)
        task = bar.add_task(f"compiling {title}", total=len(STAGES), stage="")

        def report(stage: str, share: float) -> None:
            bar.start()  # does nothing the second time
            bar.update(task, completed=STAGES.index(stage) + min(share, 1.0), stage=_WORDS[stage])

        try:
            yield report
        finally:
            bar.stop()


@contextmanager
def generate_progress(num_answers: int, *, show: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Give a callback `(answers finished, tokens generated)`, both since the last call; for any thread.

    `show` None: a bar if stderr is a terminal.
    """
    console = Console(stderr=True)
    if show is False or not (show or console.is_terminal):
        yield lambda answers, tokens: None
        return
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
    )
    began, total = time.monotonic(), 0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=num_answers, rate=0.0)

        def advance(answers: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            bar.update(task, advance=answers, rate=total / max(time.monotonic() - began, 1e-9))

        yield advance


def _plain(console: Console, title: str) -> Report:
    started: dict[str, float] = {}

    def report(stage: str, share: float) -> None:
        if stage not in started:
            started[stage] = time.perf_counter()
        if share >= 1.0 and started[stage] >= 0:
            seconds = time.perf_counter() - started[stage]
            started[stage] = -1.0
            if seconds >= 0.05:  # a stage that took no time is no news
                console.print(
                    f"compiling {title}: {_WORDS[stage]}, {seconds:.1f} s", highlight=False, soft_wrap=True
                )

    return report
