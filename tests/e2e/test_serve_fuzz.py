"""Small numbers of what `benchmarks/server_safety.py` has large ones of: hostile clients, a real server."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fuzz_client import fuzz, leave, open_idle
from tests.support.server_process import ServerProcess, eventually, serving

SEED = 7
LONG: dict[str, object] = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fuzz")
    flags = ("--kv.idle-shrink-s=0.3", "--kv.initial-mib=1", "--max-model-len=256")
    with serving(folder, tiny_artifact, *flags) as running:
        yield running
    assert "Traceback" not in running.log
    assert running.process.returncode == 0


def settled(server: ServerProcess) -> None:
    """All connections of the clients are gone and the engine's books are balanced."""
    time.sleep(1.0)  # a closed socket is known to be gone after one second
    eventually(lambda: server.metrics()["connections"] <= 1, 20)
    server.wait_idle(20)
    assert server.metrics()["bodies_bytes"] == 0


async def test_drawn_requests_get_no_5xx_no_hang_and_readable_answers(server):
    report = await fuzz(server.port, 2000, seed=SEED)
    assert report.faults == []
    assert report.answered > 1800
    assert report.statuses[200] > 100
    assert report.statuses[400] > 500
    await asyncio.to_thread(settled, server)


async def test_clients_that_leave_at_random_moments_leave_nothing(server):
    await leave(server.port, 300, seed=SEED)
    await asyncio.to_thread(settled, server)
    assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})[0] == 200


async def test_streams_that_nobody_reads_hold_nobody_up_and_go_with_their_clients(server):
    writers = await open_idle(server.port, 60, "/v1/completions", LONG)
    await asyncio.to_thread(server.wait_idle, 60)  # all are answered, into buffers
    began = time.monotonic()
    status, _ = await asyncio.to_thread(server.post, "/v1/completions", {"prompt": "hello", "max_tokens": 2})
    assert (status, time.monotonic() - began < 5) == (200, True)  # 5 ms on an idle machine
    for writer in writers:
        writer.transport.abort()
    await asyncio.to_thread(settled, server)
