"""Chunks of a stream are the same bytes whether aiohttp frames them or we do."""

import asyncio
import json
import re

import pytest

from ostinato.runtime.http import event_stream
from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.http.chat_parts import content_json
from tests.support.fake_engine import say
from tests.support.serving import serving
from tests.support.toy_text import tokenizer

TURN = {"role": "user", "content": "hi"}
BODY = {"messages": [TURN], "stream": True, "max_tokens": 40}
IDS = [20 + i % 50 for i in range(40)]


async def raw_answer(url, version="1.1"):
    """Status line, headers and body as they are on the wire."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
    writer.write(
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.split(b"\r\n\r\n", 1)


def unchunked(body):
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n"
        out, body = out + body[:length], body[length + 2 :]
        if not length:
            assert body == b""
    return out


def same(body):
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", body)


async def test_our_framing_and_aiohttps_give_the_same_body(monkeypatch):
    async with serving(say(IDS)) as served:
        head, ours = await raw_answer(served.url)
        _, plain = await raw_answer(served.url, "1.0")
        taken = []
        monkeypatch.setattr(event_stream, "sent_at_once", lambda *args: taken.append(args))
        _, theirs = await raw_answer(served.url)
    assert b"Transfer-Encoding: chunked" in head
    assert len(taken) > 30  # all but the first chunk
    assert same(unchunked(ours)) == same(unchunked(theirs)) == same(plain)
    assert unchunked(ours).endswith(b"data: [DONE]\n\n")


class Transport:
    def __init__(self, waiting=0, closing=False):
        self.waiting, self.closing, self.sent = waiting, closing, b""

    def is_closing(self):
        return self.closing

    def get_write_buffer_size(self):
        return self.waiting

    def write(self, data):
        self.sent += data


def test_nothing_is_sent_past_bytes_that_wait_or_to_a_client_that_left():
    for transport in (Transport(waiting=1), Transport(closing=True)):
        assert not event_stream.sent_at_once(transport, b"event")
        assert transport.sent == b""
    assert not event_stream.sent_at_once(None, b"event")
    idle = Transport()
    assert event_stream.sent_at_once(idle, b"x" * 17)
    assert idle.sent == b"11\r\n" + b"x" * 17 + b"\r\n"


@pytest.mark.parametrize(
    "text", ["", "plain", 'quotes " and \\', "grüße\u2028\n\r\t\x00", "\U0001f600", "\ud800"]
)
def test_text_is_written_as_the_library_writes_it(text):
    plain = json.dumps(text, separators=(",", ":"), allow_nan=False)
    assert dump(text) == plain
    assert (
        content_json(text) == f'{{"content":{plain}}}' == json.dumps({"content": text}, separators=(",", ":"))
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump(float("inf"))


ASKED = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/messages": {**BODY, "max_tokens": 5},
    "/v1/responses": {"input": "hi", "stream": True},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("withheld", [False, True], ids=["text", "half a character"])
async def test_the_first_event_leaves_with_the_headers_which_never_wait_for_text(monkeypatch, path, withheld):
    """Two sends would wake the client twice; a first token without text sends the headers all the same."""
    sends = []
    transport = asyncio.selector_events._SelectorSocketTransport
    write = transport.write
    monkeypatch.setattr(transport, "write", lambda self, data: (sends.append(bytes(data)), write(self, data)))
    first = tokenizer().encode("😀", add_special_tokens=False).ids if withheld else [20]
    async with serving(say([*first, 21, 22])) as served:
        response = await served.http.post(served.url + path, json=ASKED[path])
        body = await response.read()
    answers = [send for send in sends if not send.startswith(b"POST ")]
    head, _, rest = answers[0].partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    # only text completions have nothing to say when there is no text
    assert (b"data: {" in rest) == (not withheld or path != "/v1/completions")
    assert body.count(b"data: ") > 2


@pytest.mark.parametrize(
    ("path", "fields", "hops"),
    [
        ("/v1/completions", {"prompt": "a"}, 0),
        ("/v1/completions", {"prompt": "a" * 1025}, 1),
        ("/v1/completions", {"prompt": ["a", "b"]}, 1),
        ("/v1/chat/completions", {"messages": [TURN]}, 0),
        ("/v1/chat/completions", {"messages": [{**TURN, "content": "a" * 1025}]}, 1),
        ("/v1/chat/completions", {"messages": [TURN] * 30}, 1),
        ("/v1/chat/completions", {"messages": [TURN], "chat_template_kwargs": {"n": 10**9}}, 1),
    ],
)
async def test_only_a_few_words_are_tokenised_on_the_loop(monkeypatch, path, fields, hops):
    async with serving(say([20]), window=4096) as served:
        threads, taken = served.state.text._threads, []
        submit = threads.submit
        monkeypatch.setattr(threads, "submit", lambda *work: (taken.append(work), submit(*work))[1])
        assert (await served.post(path, fields))[0] == 200
        assert len(taken) == hops
