"""A client that leaves frees its sequences; one that only ends its sending side gets its answer."""

import asyncio
import gc
import http.client
import json
import socket

import pytest
from aiohttp.test_utils import TestServer

from ostinato.runtime.config import ServerConfig
from ostinato.runtime.http.server import make_app
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from tests.support.fake_engine import FakeEngine, info, say
from tests.support.serving import Served, serving
from tests.support.toy_text import front_end

FIELDS: dict[str, object] = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}


def slow(request: GenerateRequest) -> list[TokenEvent]:
    return [TokenEvent(request_id=request.request_id, token_ids=(10,))] * 100_000


def raw_request(**fields: object) -> bytes:
    body = json.dumps({**FIELDS, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("n", [1, 4])
async def test_leaving_a_stream_aborts_all_its_sequences(n: int):
    async with serving(slow, window=5000) as served:
        served.engine.step_s = 0.005
        reader, writer = await connect(served)
        writer.write(raw_request(stream=True, n=n))
        await reader.readuntil(b"data: ")
        assert len(served.engine.running) == n
        await close(writer)
        await until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == n


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("n", [1, 4])
async def test_leaving_before_the_first_token_aborts_within_a_second(stream: bool, n: int):
    """Queued or in prefill: nothing is written yet, so only the probe can find out."""
    async with serving(slow, window=5000) as served:
        served.engine.gate = asyncio.Event()
        _, writer = await connect(served)
        writer.write(raw_request(stream=stream, n=n))
        await until(lambda: len(served.engine.running) == n)
        await close(writer)
        await until(lambda: not served.engine.running, seconds=1.5)
        assert len(served.engine.aborted) == n
        assert served.state.live == {}


async def test_leaving_with_a_reset_aborts_at_once():
    async with serving(slow, window=5000) as served:
        served.engine.gate = asyncio.Event()
        _, writer = await connect(served)
        writer.write(raw_request())
        await until(lambda: served.engine.running)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        writer.close()
        await until(lambda: not served.engine.running, seconds=1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("wait_s", [0.0, 0.4], ids=["short", "probed"])
async def test_ending_only_the_sending_side_does_not_abort(stream: bool, wait_s: float):
    async with serving(say([10] * 20), window=5000) as served:
        served.engine.gate = asyncio.Event()
        reader, writer = await connect(served)
        writer.write(raw_request(stream=stream, max_tokens=20))
        writer.write_eof()  # the FIN comes right behind the request
        await asyncio.sleep(wait_s)
        served.engine.gate.set()
        raw = await asyncio.wait_for(reader.read(), 5)  # and the server closes when the answer is out
        await close(writer)
        assert served.engine.aborted == []
    probes, _, rest = raw.rpartition(b"HTTP/1.1 200")
    assert probes in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
    assert bool(probes) == bool(wait_s)
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def read_with_http_client(port: int) -> tuple[int, dict]:
    """Ends the sending side, waits, and reads as Python's own client does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/completions", json.dumps({**FIELDS, "max_tokens": 20}))
    connection.sock.shutdown(socket.SHUT_WR)
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body


async def test_ordinary_client_does_not_see_the_probes():
    async with serving(say([10] * 20), window=5000) as served:
        served.engine.gate = asyncio.Event()
        reading = asyncio.create_task(
            asyncio.to_thread(read_with_http_client, int(served.url.rsplit(":", 1)[1]))
        )
        await asyncio.sleep(0.4)
        served.engine.gate.set()
        status, body = await reading
    assert (status, body["usage"]["completion_tokens"]) == (200, 20)


async def test_half_closed_stream_is_probed_with_comments_and_freed_when_the_client_leaves():
    gate = asyncio.Event()

    async with serving(slow, window=5000) as served:
        served.engine.gate = gate
        reader, writer = await connect(served)
        writer.write(raw_request(stream=True))
        writer.write_eof()
        await until(lambda: served.engine.running)
        gate.set()
        await reader.readuntil(b"data: ")
        gate.clear()  # the engine stalls; nothing but probes is written now
        await reader.readuntil(b"\r\n3\r\n:\n\n\r\n")
        assert served.engine.running
        await close(writer)
        await until(lambda: not served.engine.running, seconds=2)


async def test_reader_that_reads_nothing_does_not_hold_up_others_nor_the_shutdown():
    async with serving(slow, window=200_000, drain_s=0.2) as served:
        _, writer = await connect(served)
        writer.transport.pause_reading()
        writer.write(raw_request(stream=True, max_tokens=100_000, n=8))
        await until(lambda: len(served.engine.running) == 8)
        status, _ = await served.post("/v1/completions", {**FIELDS, "max_tokens": 3})
        assert status == 200
        served.stop.set()
        async with asyncio.timeout(10):
            await served.task
        writer.transport.abort()


async def test_half_a_body_and_then_the_end_is_closed():
    async with serving(slow) as served:
        reader, writer = await connect(served)
        writer.write(raw_request()[:-5])
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 3) == b""
        await close(writer)


async def test_two_hundred_leavers_leave_nothing_behind():
    async with serving(slow, window=5000) as served:
        served.engine.step_s = 0.001

        async def leave(which: int) -> None:
            reader, writer = await connect(served)
            writer.write(raw_request(stream=which % 2 == 0, n=1 + which % 3))
            if which % 2 == 0:
                await reader.readuntil(b"data: ")
            else:
                await asyncio.sleep(0.01)
            await close(writer)

        await leave(0)
        await until(lambda: not served.engine.running)
        before = len(asyncio.all_tasks())
        for batch in range(10):
            await asyncio.gather(*(leave(batch * 20 + which) for which in range(20)))
        await until(lambda: not served.engine.running and len(asyncio.all_tasks()) <= before)
        assert served.state.live == {}
        await until(lambda: served.state.connections.open == 0)
        gc.collect()
        status, body = await served.post("/v1/completions", {**FIELDS, "max_tokens": 3})
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)


async def test_idle_connection_is_closed_when_the_client_ends_its_side():
    async with serving(say([10])) as served:
        reader, writer = await connect(served)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 3) == b""
        await close(writer)


async def test_leaver_is_noticed_under_any_runner():
    engine = FakeEngine(slow, info(vocab_size=410, max_model_len=5000), gate=asyncio.Event())
    async with TestServer(make_app(engine, ServerConfig(drain_s=0), front_end())) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw_request())
        await until(lambda: engine.running)
        await close(writer)
        await until(lambda: not engine.running, seconds=1.5)
