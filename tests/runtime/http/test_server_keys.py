"""Keys and their limits through HTTP: who is let in, who must wait how long, who pays for which tokens."""

import asyncio
from pathlib import Path

import pytest

from tests.runtime.http.test_server_status import scrape
from tests.support.fake_engine import say
from tests.support.serving import serving

ASK = {"prompt": "hello", "max_tokens": 5}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer second"}, 200),
        ({"Authorization": "bearer  first "}, 200),
        ({"X-Api-Key": "second"}, 200),
        ({"X-Api-Key": "third"}, 401),
        ({"Authorization": "Bearer third", "X-Api-Key": "first"}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "first"}, 401),
        ({"Authorization": "Bearer first,second"}, 401),
    ],
    ids=str,
)
async def test_any_of_several_keys_opens_the_api(headers: dict[str, str], status: int):
    async with serving(say([10]), api_key="first,second") as served:
        got, body = await served.post("/v1/completions", ASK, **headers)
        assert got == status
        if status == 401:
            assert body["error"]["code"] == "invalid_api_key"
            assert served.engine.requests == []


async def test_requests_at_once_of_one_key_do_not_count_for_another():
    async with serving(say([10] * 3), api_key="a,b", limits={"concurrent": 1}) as served:
        served.engine.gate = asyncio.Event()
        running = asyncio.create_task(served.post("/v1/completions", ASK, Authorization="Bearer a"))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        async with served.http.post(
            served.url + "/v1/completions", json=ASK, headers={"Authorization": "Bearer a"}
        ) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["code"] == "rate_limited"
        served.engine.gate.set()
        assert (await served.post("/v1/completions", ASK, Authorization="Bearer b"))[0] == 200
        assert (await running)[0] == 200
        assert (await served.post("/v1/completions", ASK, Authorization="Bearer a"))[0] == 200
        samples = await scrape(served)
        assert samples["ostinato_rate_limited_total", "key-1", "concurrent"] == 1
        assert samples["ostinato_key_responses_total", "key-1", "200"] == 2


async def test_a_client_that_leaves_gives_its_place_back():
    async with serving(say([10] * 3), limits={"concurrent": 1}) as served:
        served.engine.gate = asyncio.Event()
        running = asyncio.create_task(served.post("/v1/completions", ASK))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        running.cancel()
        served.engine.gate.set()
        while (status := (await served.post("/v1/completions", ASK))[0]) == 429:
            await asyncio.sleep(0.01)
        assert status == 200


async def test_tokens_of_prompt_and_answer_are_paid_and_then_the_key_waits():
    async with serving(say([10] * 5), limits={"tokens_per_minute": 6}) as served:
        assert (await served.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 5}))[0] == 200
        async with served.http.post(served.url + "/tokenize", json={"prompt": "a"}) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["Retry-After"]) <= 11  # one token over six a minute, and a bit
            assert "6 tokens a minute" in (await response.json())["error"]["message"]
        samples = await scrape(served)  # it is no request of a key
        assert samples["ostinato_key_tokens_total", "anonymous", "prompt"] == 2
        assert samples["ostinato_key_tokens_total", "anonymous", "generated"] == 5


async def test_reading_is_not_limited():
    async with serving(say([10]), limits={"requests_per_minute": 1}) as served:
        assert (await served.post("/v1/completions", ASK))[0] == 200
        assert (await served.post("/v1/completions", ASK))[0] == 429
        for path in ("/v1/models", "/health", "/config", "/version"):
            assert (await served.get(path))[0] == 200


async def test_keys_are_in_no_answer_and_no_line_of_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "SECRET-F"\n')
    settings = {
        "api_key": "SECRET-A",
        "api_key_file": str(keys),
        "admin_key": "SECRET-R",
        "access_log": "json",
    }
    async with serving(say([10]), **settings) as served:
        shown = []
        for key in ("SECRET-A", "SECRET-F", "SECRET-R", "SECRET-wrong"):
            for path in ("/config", "/v1/models", "/metrics", "/v1/SECRET-path?key=SECRET-query"):
                async with served.http.get(
                    served.url + path, headers={"Authorization": f"Bearer {key}"}
                ) as got:
                    shown.append(f"{got.headers} {await got.text()}".replace("/v1/SECRET-path", ""))
            shown.append(
                str(await served.post("/v1/completions", {**ASK, "n": 0}, Authorization=f"Bearer {key}"))
            )
        port = int(served.url.rsplit(":", 1)[1])
        for line in (
            b"Authorization: Bearer SECRET-A\x00",
            b"Authorization : Bearer SECRET-A",
            b"\x01SECRET-A",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /config HTTP/1.1\r\n" + line + b"\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
    assert "SECRET" not in "".join(shown)
    assert "SECRET" not in caplog.text
