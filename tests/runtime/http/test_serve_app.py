"""Listening, draining, signals."""

import asyncio
import json
import os
import signal

import pytest

from ostinato.errors import ConfigError, ModelError
from ostinato.runtime.config import ServerConfig
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from tests.support.fake_engine import FakeEngine, info, say
from tests.support.serving import serving
from tests.support.toy_text import front_end

FIELDS = {"prompt": "hello", "max_tokens": 20}


def endless(request: GenerateRequest) -> list[TokenEvent]:
    return [TokenEvent(request_id=request.request_id, token_ids=(10,))] * 100_000


def test_port_in_use_is_a_config_error_that_names_the_port():
    with listen(ServerConfig(port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port={port}: in use on 127\.0\.0\.1"):
            listen(ServerConfig(port=port))


def test_address_of_another_machine_is_a_config_error():
    with pytest.raises(ConfigError, match=r"server\.host=192\.0\.2\.1 .*cannot listen"):
        listen(ServerConfig(host="192.0.2.1", port=0))


async def test_engine_that_cannot_start_is_the_callers_error():
    engine = FakeEngine(endless, info(vocab_size=410))

    async def start() -> None:
        raise ModelError("no shard 2")

    engine.start = start
    config = ServerConfig(port=0)
    with pytest.raises(ModelError, match="no shard 2"):
        await serve(make_app(engine, config, front_end()), listen(config))


async def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones():
    async with serving(say([10] * 20), drain_s=5) as served:
        served.engine.gate = asyncio.Event()
        running = asyncio.create_task(served.post("/v1/completions", FIELDS))
        while not served.engine.running:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        while not served.state.draining:
            await asyncio.sleep(0.005)
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        served.engine.gate.set()
        status, body = await running
        assert (status, body["usage"]["completion_tokens"]) == (200, 20)
        await served.task
        assert served.engine.closed
        assert served.engine.aborted == []


async def test_request_on_an_open_connection_is_refused_while_draining():
    async with serving(endless, window=200_000, drain_s=5) as served:
        served.state.draining = True
        status, body = await served.post("/v1/completions", FIELDS)
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert (await served.get("/health"))[1]["status"] == "draining"


@pytest.mark.parametrize("stream", [True, False])
async def test_request_that_outlasts_the_drain_is_aborted_and_told_so(stream: bool):
    async with serving(endless, window=200_000, drain_s=0.1) as served:
        served.engine.step_s = 0.01
        fields = {"prompt": "x", "max_tokens": 100_000, "stream": stream, "n": 2}
        running = asyncio.create_task(served.http.post(served.url + "/v1/completions", json=fields))
        while len(served.engine.running) < 2:
            await asyncio.sleep(0.005)
        served.stop.set()
        response = await running
        text = await response.text()
        await served.task
    assert '"code": "aborted"' in text
    assert "[DONE]" not in text
    assert response.status == (200 if stream else 503)


async def test_second_signal_aborts_what_still_runs():
    async with serving(endless, window=200_000, drain_s=60) as served:
        served.engine.gate = asyncio.Event()
        running = asyncio.create_task(served.http.post(served.url + "/v1/completions", json=FIELDS))
        while not served.engine.running:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        while not served.state.draining:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await served.task
        response = await running
        assert (response.status, (await response.json())["error"]["code"]) == (503, "aborted")
        assert served.engine.closed


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS, sent to a port without it
    ],
)
async def test_malformed_http_gets_the_error_body_and_one_line_of_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
):
    async with serving(say([10])) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        writer.close()
        assert head.split()[1] == b"400"
        assert b"X-Request-Id: " in head
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
        assert error["message"].startswith("malformed HTTP: ")
        assert (await served.get("/health"))[0] == 200
    (record,) = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert record.getMessage().startswith("malformed HTTP from 127.0.0.1: ")
    assert record.exc_info is None
    assert record.getMessage().isprintable()
