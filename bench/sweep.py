"""All points and runs of `bench serve`, one after the other, against one server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ostinato.bench.arrivals import arrival_times
from ostinato.bench.confidence import over_runs
from ostinato.bench.data_settings import DataSettings
from ostinato.bench.datasets import make_items
from ostinato.bench.fd_limit import raise_fd_limit
from ostinato.bench.load import LoadSettings, run_load
from ostinato.bench.load_item import LoadItem
from ostinato.bench.processes import run_in_processes
from ostinato.bench.ready import call_hook, find_model, wait_ready
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sender import Sender, open_session
from ostinato.bench.summary import SummarySettings, read_goodput, summarize
from ostinato.bench.target import TargetSettings
from ostinato.errors import ConfigError


class Point(NamedTuple):
    """One pair of the sweep."""

    request_rate: float
    max_concurrency: int

    @property
    def name(self) -> str:
        """For titles and file names."""
        return f"rate-{self.request_rate:g}-concurrency-{self.max_concurrency or 'any'}"


class Watcher:
    """Hears how far a sweep is; the methods do nothing here."""

    def begin(self, title: str, requests: int) -> None:
        """A run of so many requests starts."""

    def advance(self, requests: int, tokens: int) -> None:
        """So many more are answered, with so many output tokens."""

    def end(self, point: Point, run: int, records: list[RequestRecord]) -> None:
        """The run is over. Not called for warm-ups."""


async def run_sweep(
    target: TargetSettings,
    data: DataSettings,
    load: LoadSettings,
    summary: SummarySettings,
    *,
    watcher: Watcher | None = None,
    save_requests: bool = False,
) -> tuple[str, list[dict[str, Any]]]:
    """The model's name, and for each point: its runs' summaries, their means and intervals.

    Each run draws other prompts than the one before; what prompts share is the same in all runs.
    Raises ConfigError when the server does not answer.
    """
    watcher = watcher or Watcher()
    read_goodput(summary.goodput)
    _check(data, target)
    async with open_session(target) as http:
        model = await find_model(http, target)
        sender = Sender(http, target, model)

        async def run(title: str, items: Sequence[LoadItem], point: Point, draw: int) -> list[RequestRecord]:
            rng = np.random.default_rng([data.seed, draw, 1])
            due = arrival_times(
                len(items),
                point.request_rate,
                rng,
                burstiness=load.burstiness,
                ramp=load.ramp_up,
                ramp_from=load.ramp_start_rate,
            )
            watcher.begin(title, sum(len(item.turns) for item in items))
            if load.processes > 1:
                return await run_in_processes(
                    target,
                    model,
                    items,
                    due,
                    processes=load.processes,
                    concurrency=point.max_concurrency,
                    save_text=load.save_text,
                    on_news=watcher.advance,
                )
            raise_fd_limit(min(point.max_concurrency or len(items), len(items)))
            return await run_load(
                sender,
                items,
                due,
                concurrency=point.max_concurrency,
                save_text=load.save_text,
                on_done=lambda record: watcher.advance(1, record.output_tokens or 0),
            )

        await wait_ready(sender, make_items(data, 1, draw=0)[0], target.ready_timeout_s)
        points = [Point(*pair) for pair in product(load.request_rate, load.max_concurrency)]
        if load.warm_ups:
            warm = make_items(data, load.warm_ups, draw=0)
            records = await run("warm-up", warm, Point(math.inf, points[0].max_concurrency), 0)
            if failed := [record for record in records if not record.ok]:
                raise ConfigError(f"{len(failed)} of {len(records)} warm-ups failed: {failed[0].error}")
        out = []
        for at, point in enumerate(points):
            summaries, dumps = [], []
            for number in range(load.runs):
                draw = 1 + at * load.runs + number
                items = make_items(data, draw=draw)
                await call_hook(http, target, target.profile_start)
                records = await run(f"{point.name} run {number + 1}/{load.runs}", items, point, draw)
                await call_hook(http, target, target.profile_stop)
                summaries.append(summarize(records, summary))
                dumps.append([record.dump(with_text=load.save_text) for record in records])
                watcher.end(point, number, records)
            out.append(
                {
                    "request_rate": "inf" if math.isinf(point.request_rate) else point.request_rate,
                    "max_concurrency": point.max_concurrency,
                    "runs": summaries,
                    "over_runs": over_runs(summaries),
                    **({"requests": dumps} if save_requests else {}),
                }
            )
    return model, out


def _check(data: DataSettings, target: TargetSettings) -> None:
    if (target.backend == "rerank") != (data.dataset == "rerank") and data.dataset != "custom":
        raise ConfigError(
            f"--backend {target.backend} with --dataset {data.dataset}: rerank needs both, or custom"
        )
    if target.backend == "embeddings" and data.dataset == "multi_turn":
        raise ConfigError("--backend embeddings with --dataset multi_turn: it has no answers")
