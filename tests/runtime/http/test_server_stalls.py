"""Clients that stall or take too much: heads, bodies and answers that stop, connections, memory, time."""

import asyncio
import json
import socket
import time

import pytest

from tests.runtime.http.test_server_status import scrape
from tests.support.fake_engine import say
from tests.support.fuzz_client import read_answer
from tests.support.serving import Served, serving

ASK = {"prompt": "hello", "max_tokens": 5}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_a_head_that_does_not_come_whole_ends_the_connection_however_slowly_it_trickles():
    async with serving(say([10]), header_timeout_s=0.3, keepalive_s=30) as served:
        silent = await connect(served)
        slow = await connect(served)
        began = time.monotonic()

        async def trickle() -> None:
            for byte in HEAD * 100:
                slow[1].write(bytes([byte]))
                await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        assert await ended(silent[0]) == await ended(slow[0]) == b""
        assert time.monotonic() - began < 8  # 0.3 s on an idle machine
        task.cancel()
        for _, writer in (silent, slow):
            writer.close()
        assert (await scrape(served))["ostinato_connections_dropped_total", "header_timeout"] == 2


async def test_a_second_request_on_a_connection_has_its_own_time_for_its_head():
    async with serving(say([10]), header_timeout_s=0.4, keepalive_s=30) as served:
        reader, writer = await connect(served)
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(3):
            writer.write(whole)
            assert (await read_answer(reader))[0] == 200
            await asyncio.sleep(0.2)  # idle between requests is another clock
        await asyncio.sleep(0.4)
        writer.write(whole)
        assert (await read_answer(reader))[0] == 200
        writer.write(whole[:20])
        assert await ended(reader) == b""
        writer.close()


async def test_a_long_answer_is_not_taken_for_a_head_that_is_late():
    async with serving(say([10] * 5), header_timeout_s=0.1) as served:
        served.engine.step_s = 0.1
        assert (await served.post("/v1/completions", ASK))[0] == 200


async def test_a_body_that_does_not_come_whole_is_a_408():
    async with serving(say([10]), body_timeout_s=0.2) as served:
        for framing, part in (
            (b"Content-Length: 100\r\n\r\n", b'{"prompt"'),
            (b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nabcde\r\n"),
        ):
            reader, writer = await connect(served)
            writer.write(HEAD + framing + part)
            status, _, body = await read_answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
            writer.close()
        assert served.state.bodies.held_bytes == 0
        assert served.engine.requests == []


async def test_bodies_on_their_way_share_a_memory_and_give_it_back():
    async with serving(say([10]), max_bodies_mib=1.0, max_body_mib=0.9) as served:
        half = b"x" * 600_000
        first, second = await connect(served), await connect(served)
        first[1].write(HEAD + b"Content-Length: 700000\r\n\r\n" + half)
        while served.state.bodies.held_bytes < 600_000:
            await asyncio.sleep(0.001)
        second[1].write(HEAD + b"Content-Length: 600000\r\n\r\n" + half)
        status, headers, body = await read_answer(second[0])
        assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        first[1].close()
        second[1].close()
        while served.state.bodies.held_bytes:
            await asyncio.sleep(0.001)
        assert (await served.post("/v1/completions", ASK))[0] == 200


async def test_connections_over_the_limit_get_a_503_and_cost_no_place():
    async with serving(say([10]), max_connections=3) as served:
        held = [await connect(served) for _ in range(3)]
        while served.state.connections.open < 3:
            await asyncio.sleep(0.001)
        for _ in range(5):
            reader, writer = await connect(served)
            answer = await ended(reader)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"code": "too_many_connections"' in answer
            writer.close()
        held[0][1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_answer(held[0][0]))[0] == 200
        for _, writer in held:
            writer.close()
        while served.state.connections.open:
            await asyncio.sleep(0.01)
        assert (await served.get("/health"))[0] == 200
        assert served.state.connections.dropped == {"full": 5}


async def test_a_reader_that_reads_nothing_is_dropped_and_others_are_not_held_up():
    """Some ten megabytes wait for it: more than the sockets hold."""
    async with serving(say([10] * 60_000, chunk=500), window=70_000, send_timeout_s=0.3) as served:
        body = json.dumps({"prompt": "x", "max_tokens": 60_000, "stream": True, "logprobs": 15}).encode()
        small = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader, writer = await asyncio.open_connection(sock=small)
        writer.transport.pause_reading()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not served.engine.requests:
            await asyncio.sleep(0.001)
        while served.engine.running:
            assert (await served.post("/v1/completions", ASK))[0] == 200
        assert served.state.connections.dropped["send_timeout"] == 1
        writer.transport.abort()
        assert reader is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_generation_that_takes_too_long_ends_with_its_error_and_is_aborted(stream: bool):
    async with serving(say([10] * 1000), window=2000, request_timeout_s=0.15) as served:
        served.engine.step_s = 0.01
        fields = {"prompt": "x", "max_tokens": 1000, "stream": stream, "n": 2}
        async with served.http.post(served.url + "/v1/completions", json=fields) as answer:
            text = await answer.text()
            assert answer.status == (200 if stream else 504)
        assert '"code": "generation_timeout"' in text
        assert "within 0.15 s (server.request_timeout_s)" in text
        assert "[DONE]" not in text
        while served.engine.running:
            await asyncio.sleep(0.01)
        assert (await served.post("/v1/completions", {**ASK, "max_tokens": 2}))[0] == 200
