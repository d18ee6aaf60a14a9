"""Sends a list of items at given times, at most so many at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from ostinato.bench.load_item import LoadItem
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sender import Sender
from ostinato.section import Section

Done = Callable[[RequestRecord], None]


class LoadSettings(Section):
    """How the requests are sent. Several rates or concurrencies make a sweep over all pairs."""

    request_rate: tuple[PositiveFloat, ...] = Field(
        (math.inf,), min_length=1, description="requests per second, or several; inf: all at once"
    )
    burstiness: float = Field(1.0, gt=0, description="shape of the gaps: 1 Poisson, less: bursts, inf: even")
    max_concurrency: tuple[NonNegativeInt, ...] = Field(
        (0,), min_length=1, description="requests at once, or several; 0: no limit"
    )
    ramp_up: Literal["none", "linear", "exponential"] = Field("none", description="how the rate comes up")
    ramp_start_rate: float = Field(1.0, gt=0, description="rate at the start of a ramp")
    runs: int = Field(1, ge=1, le=100, description="runs of each point; several give confidence intervals")
    warm_ups: int = Field(0, ge=0, description="requests before the first run that are not measured")
    processes: int = Field(
        1, ge=1, le=64, description="client processes; one takes 15 us of a core per event"
    )
    save_text: bool = Field(False, description="keep the answers' texts in the dump of the requests")


async def run_load(
    sender: Sender,
    items: Sequence[LoadItem],
    due_s: Sequence[float],
    *,
    concurrency: int,
    start_at: float | None = None,
    indices: Sequence[int] | None = None,
    save_text: bool = False,
    on_done: Done = lambda record: None,
) -> list[RequestRecord]:
    """Send `items[i]` at `due_s[i]` seconds from the start; a record per request, in the order of sending.

    `start_at` is a moment of `time.monotonic`, which all processes of a machine share; None: now.
    `concurrency` 0 is no limit.  A conversation holds a place during its turns, not between them.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    start = time.monotonic() if start_at is None else start_at
    records: list[RequestRecord] = []

    async def run(index: int, item: LoadItem, due: float) -> None:
        answers: list[str] = []
        talks = len(item.turns) > 1
        for turn in range(len(item.turns)):
            if turn and item.pauses_s and item.pauses_s[turn]:
                await asyncio.sleep(item.pauses_s[turn])
                due = time.monotonic() - start
            async with gate:
                began = time.monotonic() - start
                record = RequestRecord(index, start_s=began, planned_s=due, turn=turn)
                records.append(record)
                answers.append(
                    await sender.send(item, record, turn=turn, answers=answers, keeps_text=talks or save_text)
                )
            due = record.end_s
            on_done(record)
            if not record.ok:
                return  # the next turn would answer to nothing

    async with asyncio.TaskGroup() as tasks:
        for at, (item, due) in enumerate(zip(items, due_s, strict=True)):
            if (wait := start + due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.create_task(run(at if indices is None else indices[at], item, due))
    return records
