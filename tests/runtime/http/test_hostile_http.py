"""Requests that try to be two, to inject headers, or to expand: one refusal each, and the server lives."""

import asyncio
import gzip
import json

import pytest

from tests.support.fake_engine import say
from tests.support.fuzz_client import read_answer
from tests.support.serving import Served, serving

BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def ask(served: Served, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(raw)
    async with asyncio.timeout(10):
        answer = await read_answer(reader)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /config HTTP/1.1\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"Content-Length: +5\r\n\r\nabcde",
        b"Content-Length: 5, 5\r\n\r\nabcde",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        b"".join(b"X-%d: a\r\n" % at for at in range(1000)) + b"\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n",
    ],
    ids=lambda framing: repr(framing[:50]),
)
async def test_a_request_whose_end_is_in_doubt_is_refused_and_its_connection_ends(framing: bytes):
    async with serving(say([10])) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        writer.write(HEAD + framing)
        async with asyncio.timeout(10):
            answer = await reader.read()  # to its end
        writer.close()
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")), answer
        assert answer.count(b"HTTP/1.") == 1
        assert served.engine.requests == []
        assert (await served.get("/health"))[0] == 200


@pytest.mark.parametrize("given", ["a\tb", "a b", "x" * 129, "é", "\x7f", "", "a\x85b"])
async def test_a_request_id_that_is_not_plain_is_replaced(given: str):
    async with serving(say([10])) as served:
        raw = HEAD + b"X-Request-Id: " + given.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
        status, headers, _ = await ask(served, raw)
        if status == 200:
            assert len(headers["x-request-id"]) == 32
            assert headers["x-request-id"].isalnum()
        else:
            assert (status, given) == (400, "\x7f")


async def test_nothing_that_a_client_says_becomes_a_header():
    async with serving(say([10])) as served:
        for path in (b"/v1/models/a%0d%0aX-Evil:%201", b"/%0d%0aX-Evil:1", b"/v1/models/\\r\\nX-Evil: 1"):
            raw = b"GET " + path.replace(b" ", b"%20") + b" HTTP/1.1\r\nHost: x\r\n\r\n"
            status, headers, _ = await ask(served, raw)
            assert status == 404
            assert "x-evil" not in headers


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "bogus"])
async def test_a_compressed_body_is_refused_unread(encoding: str):
    bomb = gzip.compress(b" " * 50_000_000)
    async with serving(say([10])) as served:
        framing = b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding.encode(), len(bomb))
        status, _, body = await ask(served, HEAD + framing + bomb)
        assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_encoding")
        assert (await served.get("/health"))[0] == 200


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/1.9", b"HTTP/3.0"])
async def test_other_versions_of_http_in_words_are_refused_also_for_streams(version: bytes):
    body = json.dumps({"prompt": "hello", "stream": True}).encode()
    async with serving(say([10])) as served:
        raw = b"POST /v1/completions " + version + b"\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        status, _, _ = await ask(served, raw + body)
        assert status == 400
        assert served.engine.requests == []


async def test_a_body_that_breaks_off_in_a_chunk_is_no_line_of_traceback(caplog: pytest.LogCaptureFixture):
    async with serving(say([10])) as served:
        raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        writer.write(raw)
        await asyncio.sleep(0.05)
        writer.write(b"abcdeXX\r\n")
        async with asyncio.timeout(10):
            assert b" 400 " in await reader.read()
        writer.close()
    assert [record for record in caplog.records if record.exc_info] == []
