"""Bad requests: the right status, OpenAI's error body of at most 1 KB, and a server that lives on."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO

import aiohttp
import pytest

from ostinato.errors import EngineDead, EngineError, RequestAborted
from ostinato.runtime.http.api_errors import error_body
from tests.support.fake_engine import say
from tests.support.serving import Served, serving

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(say([10, 11])) as running:
        yield running
        status, _ = await running.post(CHAT, GOOD)  # whatever was sent before, it still serves
        assert status == 200


BODIES = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b'[{"a":' * 100_000,
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    b'{"prompt": [' + b"1" * 4301 + b'], "messages": [], "tokens": []}',
]


def posts(served: Served) -> list[str]:
    """Every route that takes a body, but for the operator's and those of one stored response."""
    routes = served.app.router.routes()
    paths = [one.resource.canonical for one in routes if one.method == "POST" and one.resource is not None]
    return [path for path in paths if not path.startswith("/admin") and "{" not in path]


async def test_bodies_that_are_no_request_get_400_on_every_route(served: Served):
    assert {CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= set(posts(served))
    for path in posts(served):
        for raw in BODIES:
            status, body = await served.post(path, raw)
            assert status == 400, (path, raw[:40])
            assert body["error"]["type"] == "invalid_request_error"
            if not path.startswith("/v1/messages"):
                assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json"]
)
async def test_content_type_does_not_matter_when_the_body_is_json(served: Served, content_type: str):
    status, _ = await served.post(CHAT, GOOD, **{"Content-Type": content_type})
    assert status == 200


HUGE = "the quick brown fox " * 300_000  # 6 MB


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ("/v1/completions", {"prompt": HUGE}, "prompt"),
        ("/v1/completions", {"prompt": ["hi", HUGE]}, "prompt[1]"),
        ("/v1/completions", {"prompt": ["hi", "the quick brown fox " * 40]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], [1] * 64]}, "prompt[1]"),
    ],
    ids=["chat", "text", "texts", "texts, near", "ids"],
)
async def test_a_prompt_over_the_window_is_named_and_a_huge_one_never_tokenised(
    served: Served, monkeypatch, path: str, fields: dict, param: str
):
    encode = served.state.text.encode

    def checked(text: str, **rest: bool) -> list[int]:
        assert len(text) < 1000, "tokenised"
        return encode(text, **rest)

    monkeypatch.setattr(served.state.text, "encode", checked)
    status, body = await served.post(path, fields)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["param"] == param
    assert "this model's maximum context length is 64 tokens" in body["error"]["message"]
    assert ("at least 50000" in body["error"]["message"]) == (HUGE in json.dumps(fields))
    assert served.engine.requests == []


async def test_error_body_is_bounded_whatever_the_client_sent(served: Served):
    huge = "\x01😀" * 50_000
    for fields in (
        {huge: 1},
        {**GOOD, huge: 1},
        {**GOOD, "model": huge},
        {"messages": [{"role": huge, "content": "x"}]},
        {**GOOD, "chat_template_kwargs": {"messages": huge}},
        {**GOOD, "stop": [huge]},
    ):
        async with served.http.post(served.url + CHAT, json=fields) as response:
            raw = await response.read()
            assert response.status in (400, 404)
            assert len(raw) <= 1024
            json.loads(raw)


@pytest.mark.parametrize("error", [EngineError("x" * 5000), EngineDead("\n\0é" * 3000), ValueError("z")])
def test_error_body_of_any_exception_fits_in_a_kilobyte(error: Exception):
    assert len(error_body(error)) <= 1024
    json.loads(error_body(error))


async def test_unknown_model_is_404_and_names_the_served_one(served: Served):
    status, body = await served.post(CHAT, {**GOOD, "model": "gpt-4"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert "'toy'" in body["error"]["message"]
    assert (await served.get("/v1/models/gpt-4"))[0] == 404


async def test_unknown_path_is_404_and_wrong_method_405_in_the_same_format(served: Served):
    for path in ("/v1/nothing", "/nothing/", "/v2/health"):  # near to none of /v1
        status, body = await served.get(path)
        assert (status, body["error"]["code"]) == (404, "unknown_url")
        assert body["error"]["message"] == f"no such path: GET {path}"
    async with served.http.get(served.url + CHAT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    async with served.http.delete(served.url + "/health") as response:
        assert response.status == 405


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/v1/messages/count_tokens/", "/v1/messages/count_tokens"),
    ],
)
async def test_a_wrong_base_address_is_answered_with_the_path_that_was_meant(
    served: Served, path: str, meant: str
):
    status, body = await served.post(path, GOOD)
    assert status == 404
    assert f"POST {path}; did you mean {meant}?" in body["error"]["message"]


async def chunks(total_mib: int) -> AsyncIterator[bytes]:
    for _ in range(total_mib):
        yield b" " * 2**20


@pytest.mark.parametrize("declared", [True, False], ids=["with a length", "chunked"])
async def test_body_over_the_limit_is_413_on_every_route(declared: bool):
    async with serving(say([10]), max_body_mib=1) as served:
        for path in posts(served):
            data = BytesIO(b" " * 2**21) if declared else chunks(3)
            async with served.http.post(served.url + path, data=data) as response:
                body = await response.json()
            assert response.status == 413, path
            assert "server.max_body_mib" in body["error"]["message"]
            if not path.startswith("/v1/messages"):
                assert body["error"]["code"] == "request_too_large"
        assert served.state.bodies.held_bytes == 0
        assert (await served.post(CHAT, GOOD))[0] == 200


async def test_body_of_hundreds_of_megabytes_is_refused_before_it_is_sent(served: Served):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 209715200\r\n\r\n")
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()


async def test_a_prompt_of_two_megabytes_is_answered_and_holds_nobody_up():
    """Its tokens are counted on another thread; the longest silence is 30 ms on an idle machine."""
    loop = asyncio.get_running_loop()
    async with serving(say([10] * 100_000), window=2_000_000) as served:
        served.engine.step_s = 0.005
        fields = {"prompt": "x", "stream": True, "max_tokens": 100_000}
        async with served.http.post(served.url + "/v1/completions", json=fields) as stream:
            long = {"messages": [{"role": "user", "content": "the dog " * 250_000}], "max_tokens": 1}
            posted = asyncio.create_task(served.post(CHAT, long))
            silences: list[float] = []
            while not posted.done():
                began = loop.time()
                await stream.content.readuntil(b"\n\n")
                assert (await served.get("/health"))[0] == 200
                silences.append(loop.time() - began)
            status, whole = await posted
        assert (status, whole["usage"]["prompt_tokens"] > 500_000) == (200, True)
        assert len(silences) > 3
        assert max(silences) < sum(silences) / 2, "most of the time went by without a word"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("secret", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Bearer sécret", 401),
        ("Basic secret", 401),
        ("Bearer secret", 200),
        ("bearer secret", 200),
    ],
)
async def test_api_key_is_required_as_a_bearer_token(header: str | None, status: int):
    async with serving(say([10]), api_key="secret") as served:
        headers = {} if header is None else {"Authorization": header}
        got, body = await served.post(CHAT, GOOD, **headers)
        assert got == status
        if status == 401:
            assert body["error"]["code"] == "invalid_api_key"
            assert served.engine.requests == []
        for path in ("/v1/models", "/config"):
            assert (await served.get(path, **headers))[0] == status
        for path in ("/health", "/version"):
            assert (await served.get(path))[0] == 200


async def test_request_id_is_echoed_or_made_and_never_split_into_headers(served: Served):
    async with served.http.get(served.url + "/version", headers={"X-Request-Id": "mine-7"}) as response:
        assert response.headers["X-Request-Id"] == "mine-7"
    for bad in ("x" * 200, "a b"):
        async with served.http.get(served.url + "/version", headers={"X-Request-Id": bad}) as response:
            assert len(response.headers["X-Request-Id"]) == 32
    async with served.http.post(
        served.url + CHAT, json={**GOOD, "stream": True}, headers={"X-Request-Id": "mine-8"}
    ) as response:
        assert response.headers["X-Request-Id"] == "mine-8"
        await response.read()


async def test_dead_engine_is_503_everywhere(served: Served):
    served.engine.dead = "killed by SIGKILL"
    status, body = await served.post(CHAT, GOOD)
    assert (status, body["error"]["code"], body["error"]["message"]) == (
        503,
        "engine_dead",
        "killed by SIGKILL",
    )
    status, body = await served.get("/health")
    assert (status, body) == (503, {"status": "dead", "reason": "killed by SIGKILL"})
    async with served.http.get(served.url + "/metrics") as response:
        assert response.status == 200
    served.engine.dead = None


async def test_aborted_request_is_told_so():
    async with serving(lambda _: [RequestAborted("stopped by the operator")]) as served:
        status, body = await served.post(CHAT, GOOD)
    assert (status, body["error"]["code"]) == (503, "aborted")


async def test_malformed_http_does_not_end_the_server(served: Served):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(b"NONSENSE\r\n\r\n")
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()


async def test_headers_of_one_request_do_not_leak_into_another_answer(served: Served):
    async with aiohttp.ClientSession() as other:
        first, second = await asyncio.gather(
            served.http.get(served.url + "/version", headers={"X-Request-Id": "one"}),
            other.get(served.url + "/version", headers={"X-Request-Id": "two"}),
        )
    assert (first.headers["X-Request-Id"], second.headers["X-Request-Id"]) == ("one", "two")
