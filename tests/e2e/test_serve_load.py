"""Crowds, leavers, bad bodies against a real server: answers stay right, books balance, memory returns."""

import asyncio
import contextlib
import json
import random
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.http_streams import GREEDY, events, stream, text_of
from tests.support.server_process import ServerProcess, eventually, rss_mib, serving

FIXED: dict[str, object] = {**GREEDY, "prompt": "the quick brown fox", "max_tokens": 64}
GROWTH_MIB = 48.0  # allocator noise of a thousand requests; a leak of one KV block row each would show more


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, tiny_artifact, "--kv.idle-shrink-s=0.3", "--kv.initial-mib=1") as running:
        yield running
        running.wait_idle()
    assert "Traceback" not in running.log
    assert running.process.returncode == 0


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def test_two_hundred_streams_at_once_all_finish_with_their_tokens(server):
    alone = {number: server.post("/v1/completions", crowd_body(number))[1] for number in (0, 77, 199)}
    async with session() as http:
        usage = {"include_usage": True}
        answers = await asyncio.gather(
            *(stream(http, server.url, **crowd_body(i), stream_options=usage) for i in range(200))
        )
    for number, answer in enumerate(answers):
        assert answer[-1] == "[DONE]"
        assert answer[-2]["usage"]["completion_tokens"] == crowd_body(number)["max_tokens"]
    for number, answer in alone.items():
        assert text_of(answers[number]) == answer["choices"][0]["text"]
    await asyncio.to_thread(server.wait_idle)


def crowd_body(number: int) -> dict[str, object]:
    return {**GREEDY, "prompt": f"{number} " + "hello world " * (number % 40), "max_tokens": 8 + number % 33}


async def test_a_thousand_random_leavers_leave_books_memory_and_answers_as_they_were(server):
    draw = random.Random(0)

    async def leave(http: aiohttp.ClientSession) -> None:
        body = {
            "prompt": "hello " * draw.randrange(1, 200),
            "max_tokens": draw.choice((5, 500, 5000)),
            "n": draw.choice((1, 1, 1, 3)),
            "stream": draw.random() < 0.7,
            "ignore_eos": True,
        }
        stays_s = draw.choice((0.0, 0.02, 0.1, 0.3)) * draw.random()
        with contextlib.suppress(TimeoutError, aiohttp.ClientConnectionError):
            async with asyncio.timeout(stays_s):
                async with http.post(f"{server.url}/v1/completions", json=body) as response:
                    assert response.status == 200
                    async for _ in events(response) if body["stream"] else response.content:
                        pass

    async def leave_many(count: int) -> None:
        async with session() as http:
            for _ in range(count // 50):
                await asyncio.gather(*(leave(http) for _ in range(50)))
        await asyncio.to_thread(server.wait_idle)
        await asyncio.to_thread(eventually, lambda: is_shrunk(server), 20)

    before = server.post("/v1/completions", FIXED)[1]["choices"]
    await leave_many(200)  # allocators, thread pools and caches reach their size
    start = {pid: rss_mib(pid) for pid in (server.pid, server.engine_pid)}
    await leave_many(1000)
    for pid, mib in start.items():
        assert rss_mib(pid) - mib < GROWTH_MIB, f"{mib:.0f} MiB became {rss_mib(pid):.0f}"
    assert server.post("/v1/completions", FIXED)[1]["choices"] == before
    assert server.get("/health")[1]["status"] == "ok"


def is_shrunk(server: ServerProcess) -> bool:
    """The KV memory that a crowd needed has gone back."""
    return server.metrics()["kv_committed_bytes"] <= 2 * 2**20


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_frees_its_sequences_within_seconds(server, is_stream):
    body = {**GREEDY, "prompt": "hello", "max_tokens": 16_000, "n": 2, "stream": is_stream}
    async with session() as http:
        asking = asyncio.create_task(hold(http, f"{server.url}/v1/completions", body))
        await asyncio.to_thread(eventually, lambda: server.metrics()["requests_running"] == 2, 10)
        asking.cancel()
        began = time.monotonic()
        await asyncio.to_thread(server.wait_idle, 10)
    assert time.monotonic() - began < 5  # two, and a loaded machine
    assert server.get("/health")[1]["running"] == 0


async def hold(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> None:
    async with http.post(url, json=body) as response:
        await response.read()


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_body_of_100_mb_is_refused_early_and_costs_no_memory(server, declared):
    before, began = rss_mib(server.pid), time.monotonic()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    head += "Content-Length: 100000000\r\n\r\n" if declared else "Transfer-Encoding: chunked\r\n\r\n"
    piece = b"x" * 10**6 if declared else b"f4240\r\n" + b"x" * 10**6 + b"\r\n"
    sent_mb = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(head.encode())
        while sent_mb < 100 and not select.select([sock], [], [], 0)[0]:
            sock.sendall(piece)
            sent_mb += 1
        raw = sock.recv(1 << 16)
    assert sent_mb < 100
    assert time.monotonic() - began < 5  # it takes 0.1 s on an idle machine
    assert raw.startswith(b"HTTP/1.1 413 "), raw[:200]
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    assert rss_mib(server.pid) - before < 80  # the limit is 32 MiB, and it is kept as pieces and whole
    assert server.post("/v1/completions", FIXED)[0] == 200


def test_broken_json_and_wrong_method_are_client_errors(server):
    for raw in (b'{"prompt": "a"', b"", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "a", "prompt": "b"}'):
        status, answer = server.post("/v1/completions", raw)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), raw
    status, answer = server.get("/v1/completions")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    status, answer = server.get("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
