"""Hostile and careless clients against `ostinato serve`: drawn requests, leavers, idle streams, slow readers.

    python -m benchmarks.server_safety [--requests 100000] [--leavers 10000] [--idle 2000] [--seed 1]

A tiny model is made and compiled first; the server is a real process with a real engine.  After a fault it
ends with 1: an answer of 5xx, a hang, an answer that no client could read, open books, a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import Row, write_record
from ostinato.runtime.compile import compile_model
from tests.support.fuzz_client import fuzz, leave, open_idle, read_answer
from tests.support.server_process import ServerProcess, rss_mib, serving
from tests.support.tiny_models import make_tiny

WINDOW = 256
GONE_S = 5.0  # a client that closed its socket is known to be gone after one second; many at once take longer
LONG: dict[str, object] = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": True}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--leavers", type=int, default=10_000)
    parser.add_argument("--idle", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_tiny("llama", folder / "model", max_position_embeddings=WINDOW)
        compile_model(model, folder / "tiny")
        with serving(folder, folder / "tiny", "--kv.idle-shrink-s=0.3", "--kv.initial-mib=1") as server:
            rows, faults = run(server, arguments)
        if server.process.returncode != 0 or "Traceback" in server.log:
            faults.append(f"the server ended with {server.process.returncode}: {server.log[-2000:]}")
    write_record("server_safety", rows)
    for fault in faults[:20]:
        print(f"FAULT {fault}", file=sys.stderr)
    return 1 if faults else 0


def run(server: ServerProcess, arguments: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Every kind of client after the other; books are checked after each."""
    assert server.port is not None  # it is ready
    warm = asyncio.run(fuzz(server.port, 500, seed=arguments.seed + 999))
    server.wait_idle(30)
    before = rss_mib(server.pid)
    rows, faults = [], warm.faults

    drawn = asyncio.run(fuzz(server.port, arguments.requests, seed=arguments.seed))
    server.wait_idle(30)
    faults += drawn.faults
    rows += [
        _row("drawn_requests", arguments.requests, "1"),
        _row("drawn_requests_faults", len(drawn.faults), "1"),
        _row("drawn_requests_per_s", drawn.answered / drawn.seconds, "1/s"),
        *(_row(f"drawn_requests_status_{status}", n, "1") for status, n in sorted(drawn.statuses.items())),
        _row("drawn_requests_closed", drawn.closed, "1"),
    ]
    left = asyncio.run(leave(server.port, arguments.leavers, seed=arguments.seed))
    time.sleep(GONE_S)
    server.wait_idle(30)
    rows += [
        _row("leavers", arguments.leavers, "1"),
        _row("leavers_per_s", arguments.leavers / left.seconds, "1/s"),
        _row("server_rss_growth_mib", rss_mib(server.pid) - before, "MiB"),
    ]
    alone, beside, faults_of_idle = asyncio.run(slow_readers(server.port, arguments.idle))
    faults += faults_of_idle
    server.wait_idle(60)
    rows += [
        _row("idle_streams", arguments.idle, "1"),
        Row.of("request_ms_beside_idle_streams", beside, "ms", statistics.median(alone), "the same alone"),
    ]
    if (still := server.metrics()["connections"]) > 1:
        faults.append(f"{still:.0f} connections are open at the end")
    return rows, faults


async def slow_readers(port: int, count: int) -> tuple[list[float], list[float], list[str]]:
    """Latencies of a short request alone, and beside `count` streams that nobody reads and are complete."""
    alone = [await short_request_ms(port) for _ in range(20)]
    writers = await open_idle(port, count, "/v1/completions", LONG)
    faults = []
    deadline = time.monotonic() + 240
    while await engine_is_busy(port):  # all answers are made, whether read or not
        if time.monotonic() > deadline:
            faults.append("answers that nobody reads did not end")
            break
        await asyncio.sleep(0.5)
    beside = [await short_request_ms(port) for _ in range(20)]
    for writer in random.sample(writers, len(writers)):
        writer.transport.abort()
    return alone, beside, faults


async def short_request_ms(port: int) -> float:
    body = json.dumps({"prompt": "hello", "max_tokens": 4, "ignore_eos": True}).encode()
    began = time.monotonic()
    status, _ = await ask(port, "POST /v1/completions", body)
    if status != 200:
        raise RuntimeError(f"a plain request got {status}")
    return (time.monotonic() - began) * 1000


async def engine_is_busy(port: int) -> bool:
    _, body = await ask(port, "GET /metrics", b"")
    rows = dict(line.rsplit(b" ", 1) for line in body.splitlines() if not line.startswith(b"#"))
    return float(rows[b"ostinato_requests_running"]) + float(rows[b"ostinato_requests_waiting"]) > 0


async def ask(port: int, line: str, body: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status, _, answer = await read_answer(reader)
    writer.close()
    return status, answer


def _row(metric: str, value: float, unit: str) -> Row:
    return Row.of(metric, [value], unit, None, "none: a count")


if __name__ == "__main__":
    sys.exit(main())
