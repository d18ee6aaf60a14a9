"""The access log: one line per request, with numbers and no text of the client, at a bounded rate."""

import asyncio
import json
import logging

import pytest

from ostinato.runtime.http.access_log import LINES_PER_S, AccessLog
from ostinato.runtime.http.request_record import RequestRecord
from tests.support.fake_engine import say
from tests.support.serving import serving

ASK = {"prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the logger `ostinato.access` writes."""
    written: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    logger = logging.getLogger("ostinato.access")
    monkeypatch.setattr(logger, "handlers", [Keeper()])
    monkeypatch.setattr(logger, "propagate", False)
    return written


async def test_json_lines_have_id_route_status_tokens_and_times(lines: list[str]):
    async with serving(say([10] * 4), access_log="json", api_key="SECRET") as served:
        key = {"Authorization": "Bearer SECRET"}
        await served.post("/v1/completions", {**ASK, "n": 2}, **{"X-Request-Id": "my-id", **key})
        await served.post("/v1/completions", {**ASK, "n": 0}, **key)
        await served.post("/v1/SECRET", ASK, **key)
        await served.post("/v1/completions", ASK)
    whole, bad, nowhere, keyless = map(json.loads, lines)
    assert 0 <= whole["ttft_ms"] <= whole["ms"]
    shown = {name: value for name, value in whole.items() if name not in ("time", "ms", "ttft_ms")}
    assert shown == {
        "id": "my-id",
        "client": "127.0.0.1",
        "key": "key-1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "sequences": 2,
        "prompt_tokens": 6,
        "cached_tokens": 0,
        "generated_tokens": 8,
        "outcome": "stop",
    }
    assert (bad["status"], bad["key"], "sequences" in bad) == (400, "key-1", False)
    assert (nowhere["status"], nowhere["route"]) == (404, "other")
    assert (keyless["status"], keyless["key"]) == (401, None)
    assert "SECRET" not in "".join(lines)


async def test_text_lines_have_the_same_and_streams_are_logged_at_their_end(lines: list[str]):
    async with serving(say([10] * 4), access_log="text") as served:
        await served.events("/v1/completions", {**ASK, "stream": True})
        await served.get("/health", **{"X-Request-Id": "probe"})
    first, second = lines
    assert " POST /v1/completions 200 ms=" in first
    assert first.endswith("sequences=1 prompt_tokens=3 cached_tokens=0 generated_tokens=4 outcome=stop")
    assert " id=probe client=127.0.0.1 key=- GET /health 200 ms=" in second


async def test_a_client_that_left_is_logged_as_499(lines: list[str]):
    async with serving(say([10] * 1000), access_log="json", window=2000) as served:
        served.engine.step_s = 0.01
        async with served.http.post(
            served.url + "/v1/completions", json={**ASK, "max_tokens": 900, "stream": True}
        ) as response:
            await response.content.readline()
        await served.http.close()
        while served.engine.running:
            await asyncio.sleep(0.01)
    (line,) = map(json.loads, lines)
    assert (line["status"], line["outcome"]) == (499, "cancelled")


async def test_off_writes_nothing(lines: list[str]):
    async with serving(say([10])) as served:
        await served.post("/v1/completions", ASK)
    assert lines == []


def test_a_flood_is_cut_and_counted(lines: list[str]):
    logging.getLogger("ostinato.access").setLevel(logging.INFO)
    now = [5.0]
    log = AccessLog("json", lambda: now[0])
    for _ in range(LINES_PER_S + 250):
        log.write(RequestRecord("a"), method="GET", route="/health", status=200, client=None)
    assert len(lines) == LINES_PER_S
    now[0] += 1.0
    for _ in range(2):
        log.write(RequestRecord("b"), method="GET", route="/health", status=200, client=None)
    assert [json.loads(line).get("left_out") for line in lines[-2:]] == [250, None]
