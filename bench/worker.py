"""One client process: `python -m ostinato.bench.worker`, a plan on stdin, records on stdout, all of it JSON.

stdin   the plan, one line; then, when every worker said ready, the moment to start
stdout  {"ready": true}, {"done": requests, "tokens": tokens} now and then, {"records": [...]}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from ostinato.bench.fd_limit import raise_fd_limit
from ostinato.bench.load import run_load
from ostinato.bench.load_item import load_item
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sender import Sender, open_session
from ostinato.bench.target import TargetSettings

_NEWS_EVERY_S = 0.2


def main() -> int:
    """Read a plan, say ready, wait for the start, run, tell."""
    plan = json.loads(sys.stdin.readline())
    asyncio.run(_run(plan))
    return 0


def _say(news: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


async def _run(plan: dict[str, Any]) -> None:
    target = TargetSettings.model_validate(plan["target"])
    items = [load_item(values) for values in plan["items"]]
    raise_fd_limit(min(plan["concurrency"] or len(items), len(items)))
    told = time.monotonic()
    news = {"done": 0, "tokens": 0}

    def on_done(record: RequestRecord) -> None:
        nonlocal told
        news["done"] += 1
        news["tokens"] += record.output_tokens or 0
        if time.monotonic() - told > _NEWS_EVERY_S:
            told = time.monotonic()
            _say(news)
            news.update(done=0, tokens=0)

    async with open_session(target) as http:
        sender = Sender(http, target, plan["model"])
        _say({"ready": True})
        start_at = float(sys.stdin.readline())
        records = await run_load(
            sender,
            items,
            plan["due_s"],
            concurrency=plan["concurrency"],
            start_at=start_at,
            indices=plan["indices"],
            save_text=plan["save_text"],
            on_done=on_done,
        )
    _say(news)
    _say({"records": [record.dump(with_text=True) for record in records]})


if __name__ == "__main__":
    sys.exit(main())
