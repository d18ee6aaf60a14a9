"""The same load from several processes, so that the client is not what is measured."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ostinato.bench.load_item import LoadItem
from ostinato.bench.request_record import RequestRecord, load_record
from ostinato.bench.target import TargetSettings
from ostinato.errors import EngineError

News = Callable[[int, int], None]  # requests and tokens since the last call
_LINE_LIMIT = 1 << 30  # the records come as one line
_LEAD_S = 0.05  # from the word "start" to the start


async def run_in_processes(
    target: TargetSettings,
    model: str,
    items: Sequence[LoadItem],
    due_s: Sequence[float],
    *,
    processes: int,
    concurrency: int,
    save_text: bool = False,
    on_news: News = lambda requests, tokens: None,
) -> list[RequestRecord]:
    """`run_load` with item i in process i modulo their number; they start together, on one clock.

    The concurrency is divided among them: what one has free another cannot use.
    """
    count = min(processes, len(items), concurrency or len(items))
    workers = [await _spawn() for _ in range(count)]
    try:
        for at, worker in enumerate(workers):
            share = range(at, len(items), count)
            plan = {
                "target": target.model_dump(),
                "model": model,
                "items": [items[i].dump() for i in share],
                "due_s": [due_s[i] for i in share],
                "indices": list(share),
                "concurrency": concurrency and concurrency // count + (at < concurrency % count),
                "save_text": save_text,
            }
            await _tell(worker, json.dumps(plan))
        for worker in workers:
            await _hear(worker)  # ready
        start = time.monotonic() + _LEAD_S
        for worker in workers:
            await _tell(worker, repr(start))
        found = await asyncio.gather(*(_records(worker, on_news) for worker in workers))
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
            worker._transport.close()  # type: ignore[attr-defined]  # else its pipes wait for the collector
    return sorted((record for some in found for record in some), key=lambda record: record.start_s)


async def _spawn() -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "ostinato.bench.worker", stdin=pipe, stdout=pipe, limit=_LINE_LIMIT
    )


async def _tell(worker: asyncio.subprocess.Process, line: str) -> None:
    assert worker.stdin is not None  # piped
    worker.stdin.write(line.encode() + b"\n")
    await worker.stdin.drain()


async def _hear(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    assert worker.stdout is not None  # piped
    line = await worker.stdout.readline()
    if not line:
        raise EngineError(f"a client process ended with {await worker.wait()}; what it said is above")
    return dict(json.loads(line))


async def _records(worker: asyncio.subprocess.Process, on_news: News) -> list[RequestRecord]:
    while "records" not in (news := await _hear(worker)):
        on_news(news["done"], news["tokens"])
    return [load_record(values) for values in news["records"]]
