"""Sends drawn requests to a server and judges every answer; leaves in the middle; reads nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from tests.support.request_mutator import FuzzRequest, RequestMutator

HANG_S = 30.0  # no answer takes that long, on a loaded machine either
PATIENCE_S = 0.3  # for an answer to bytes that may not be a whole request
ERROR_BYTES = 1200


@dataclass
class FuzzReport:
    """What came back. `faults` is empty when all is well."""

    statuses: Counter[int] = field(default_factory=Counter)
    closed: int = 0  # connections ended without an answer: legal for bytes that are no request
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def answered(self) -> int:
        """Requests with an answer."""
        return self.statuses.total()


async def fuzz(port: int, count: int, *, seed: int, clients: int = 16) -> FuzzReport:
    """`count` drawn requests over `clients` connections at once."""
    report, began = FuzzReport(), time.monotonic()
    share = [count // clients + (at < count % clients) for at in range(clients)]
    await asyncio.gather(
        *(_client(port, RequestMutator(seed * 1000 + at), share[at], report) for at in range(clients))
    )
    report.seconds = time.monotonic() - began
    return report


async def _client(port: int, mutator: RequestMutator, count: int, report: FuzzReport) -> None:
    reader = writer = None
    last = b""
    for _ in range(count):
        asked = mutator.next()
        if writer is None or writer.is_closing() or reader is None or reader.at_eof():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            stays = await _exchange(asked, reader, writer, report)
        except (ConnectionError, asyncio.IncompleteReadError):
            report.closed += 1
            stays = False
            if _is_plain(asked):
                report.faults.append(f"closed without an answer: {asked.raw[:300]!r} after {last[:700]!r}")
        except TimeoutError:
            stays = False
            if _is_plain(asked):
                report.faults.append(f"no answer in time: {asked.raw[:600]!r}")
        except ValueError as error:
            stays = False
            report.faults.append(f"{error}: {asked.raw[:600]!r}")
        last = asked.raw
        if not stays:
            last = b""
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            writer = None
    if writer is not None:
        writer.close()


def _is_plain(asked: FuzzRequest) -> bool:
    """A whole request that must be answered: one with a head and a declared body that is all there."""
    head, _, body = asked.raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ")
    declared = [line for line in lines if line.lower().startswith(b"content-length: ")]
    return (
        asked.is_http
        and len(words) == 3
        and words[2] == b"HTTP/1.1"
        and words[0] in (b"POST", b"GET")
        and declared == [b"Content-Length: %d" % len(body)]
        and b"Transfer-Encoding" not in head
        and b"Expect" not in head
    )


async def _exchange(
    asked: FuzzRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, report: FuzzReport
) -> bool:
    """One request and its answer. False: the connection cannot be used again."""
    writer.write(asked.raw)
    plain = _is_plain(asked)
    async with asyncio.timeout(HANG_S if plain else PATIENCE_S):
        await writer.drain()
        status, headers, body = await read_answer(reader, has_body=not asked.raw.startswith(b"HEAD "))
    report.statuses[status] += 1
    if status >= 500:
        report.faults.append(f"status {status}: {asked.raw[:600]!r} -> {body[:300]!r}")
    _judge(status, headers, body)
    return plain and headers["connection"] != "close"


async def read_answer(
    reader: asyncio.StreamReader, *, has_body: bool = True
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer, interim ones left out."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        if status >= 200:
            break
    headers = {"connection": "keep-alive" if head[0].startswith("HTTP/1.1") else "close"}
    headers |= {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    if not has_body or status in (204, 304):
        return status, headers, b""
    if headers.get("transfer-encoding") == "chunked":
        pieces = []
        while size := int(await reader.readline(), 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return status, headers, b"".join(pieces)
    if "content-length" in headers:
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    return status, headers, await reader.read()


def _judge(status: int, headers: dict[str, str], body: bytes) -> None:
    """ValueError for an answer that no client could read."""
    kind = headers.get("content-type", "")
    if kind.startswith("application/json") and body:
        value = json.loads(body, parse_constant=_refuse)
        if status >= 400:
            if not isinstance(value, dict) or "error" not in value:
                raise ValueError(f"an error without its object: {body[:200]!r}")
            if len(body) > ERROR_BYTES:
                raise ValueError(f"an error of {len(body)} bytes")
    elif kind.startswith("text/event-stream"):
        if not body.endswith(b"\n\n"):
            raise ValueError(f"half an event at the end: {body[-100:]!r}")
    elif status >= 400 and body:
        raise ValueError(f"an error as {kind!r}: {body[:200]!r}")


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


async def leave(port: int, count: int, *, seed: int, clients: int = 32) -> FuzzReport:
    """`count` completions whose client leaves at a random moment: sending, waiting or reading."""
    report, began = FuzzReport(), time.monotonic()
    draw = random.Random(seed)
    todo = iter(range(count))

    async def one() -> None:
        body = {
            "prompt": "hello " * draw.randrange(1, 60),
            "max_tokens": draw.choice((5, 60, 150)),
            "n": draw.choice((1, 1, 1, 3)),
            "stream": draw.random() < 0.7,
            "ignore_eos": True,
        }
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        whole = head + raw
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        cut = draw.randrange(1, len(whole)) if draw.random() < 0.15 else len(whole)
        writer.write(whole[:cut])
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(draw.choice((0.0, 0.005, 0.02, 0.1)) * draw.random()):
                await reader.read()
        if draw.random() < 0.3:  # a reset instead of a goodbye
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            writer.transport.abort()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def client() -> None:
        for _ in todo:
            await one()

    await asyncio.gather(*(client() for _ in range(clients)))
    report.seconds = time.monotonic() - began
    return report


async def open_idle(port: int, count: int, path: str, body: dict[str, object]) -> list[asyncio.StreamWriter]:
    """`count` streams whose clients never read what comes."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    writers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of asyncio's own transport
        writer.write(head + raw)
        writers.append(writer)
        assert reader is not None
    return writers
