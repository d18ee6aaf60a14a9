"""What the server itself costs: the real HTTP front end before an engine that has every token at once.

    python -m benchmarks.server_overhead [--streams 64] [--rounds 7] [--profile]

Two processes on two cores: the server with the engine inside, and this client. The engine says one token per
sequence and step, in the frames of a real engine process, as fast as the loop takes them; requests come in
waves, and a wave runs as one batch. The client counts events without parsing them. CPU time per token is that
of the server's process, so it holds on a busy machine too.

    server_overhead_tok_s       events of one token each, all streams together
    server_overhead_cpu_us_tok  CPU time of the server's process per such event
    server_overhead_ttft_ms     request sent to first event, nothing else running
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostinato.runtime.config import ServerConfig
from ostinato.runtime.frames import KINDS, Events, FrameReader
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.messages import Abort, GenerateRequest, Order
from ostinato.runtime.request_streams import StreamingClient
from tests.support.fake_engine import info
from tests.support.toy_text import front_end

TOKENS = 256  # of an answer
GATHER_S = 0.1  # the slowest that a request follows the one before it
GOAL_TOK_S, GOAL_TTFT_MS = 20_000, 1.0
ROUTES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello world, how are you today?"}]},
    "completions": {"prompt": "Hello world, how are you today?"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_HEAD = struct.Struct("!IB")


class InstantEngine(StreamingClient):
    """Says a token per sequence and step; a step is one turn of the event loop.

    It begins when `batch` requests are there, or none has come for `GATHER_S`: else the first would end
    before the last is read.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._info = info(vocab_size=410, max_model_len=4096, eos=1)
        self._left: dict[str, int] = {}
        self._frames = FrameReader()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _post(self, message: Order) -> None:
        if isinstance(message, GenerateRequest):
            self._left[message.request_id] = message.sampling.max_tokens or TOKENS
            self._work.set()
        elif isinstance(message, Abort):
            for name in message.request_ids:
                self._left.pop(name, None)

    async def _gather(self) -> None:
        known = 0
        while self._batch > len(self._left) > known:
            known = len(self._left)
            await asyncio.sleep(GATHER_S)

    async def _run(self) -> None:
        kind, token = KINDS.index(Events), 2
        while True:
            if not self._left:
                self._work.clear()
                await self._work.wait()
                await self._gather()
            token = 2 + (token + 7) % 390
            events = []
            for name, left in list(self._left.items()):
                end = ""
                if left == 1:
                    del self._left[name]
                    end = ',"finish_reason":"length"'
                else:
                    self._left[name] = left - 1
                events.append(f'{{"request_id":"{name}","token_ids":[{token}]{end}}}')
            body = f'{{"events":[{",".join(events)}]}}'.encode()
            self._deliver(self._frames.feed(_HEAD.pack(len(body) + 1, kind) + body))
            await asyncio.sleep(0)


async def serve_instant(sock: socket.socket, batch: int) -> None:
    config = ServerConfig(port=0, drain_s=0.0)
    app = make_app(InstantEngine(batch), config, front_end())
    await serve(app, sock, on_ready=lambda url: print(url, flush=True))


class Stream(asyncio.Protocol):
    """One connection that sends a request and counts what comes; done at the last chunk."""

    def __init__(self) -> None:
        self.events = 0
        self.first_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[None]:
        assert self.transport is not None
        self.events, self.first_at, self._tail, self.head = 0, 0.0, b"", b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def close(self) -> None:
        self.done.cancel()
        assert self.transport is not None
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.head:
            self.head = data[:200]
        found = data.count(b"\ndata: {")  # an event never crosses a write of the server and so seldom a read
        if found and not self.first_at:
            self.first_at = time.perf_counter()
        self.events += found
        self._tail = (self._tail + data)[-7:]
        if self._tail == b"\r\n0\r\n\r\n" and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the server hung up: {self.head!r}"))


def http_request(route: str, tokens: int) -> bytes:
    body = json.dumps({**ROUTES[route], "stream": True, "max_tokens": tokens, "temperature": 0}).encode()
    head = f"POST {PATHS[route]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def cpu_s(pid: int) -> float:
    """CPU time of the server's main thread, which runs its loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def first_token_ms(port: int) -> dict[str, list[float]]:
    """Request sent to first event, one request at a time, the routes in turn: a machine has its moments."""
    loop = asyncio.get_running_loop()
    connections = {r: (await loop.create_connection(Stream, "127.0.0.1", port))[1] for r in ROUTES}
    samples: dict[str, list[float]] = {route: [] for route in ROUTES}
    for at in range(330):
        for route, one in connections.items():
            sent = time.perf_counter()
            await one.ask(http_request(route, 4))
            if at >= 30:
                samples[route].append((one.first_at - sent) * 1e3)
            await asyncio.sleep(0.002)
    for one in connections.values():
        one.close()
    return samples


async def waves(port: int, pid: int, route: str, streams: int, rounds: int) -> dict[str, list[float]]:
    """Events per second, CPU time of the server per event, and its share of a core; by wave."""
    loop, request = asyncio.get_running_loop(), http_request(route, TOKENS)
    connections = [(await loop.create_connection(Stream, "127.0.0.1", port))[1] for _ in range(streams)]
    out: dict[str, list[float]] = {"tok_s": [], "cpu_us_tok": [], "share": []}
    for at in range(rounds + 1):
        began, awake = time.perf_counter(), cpu_s(pid)
        await asyncio.gather(*(stream.ask(request) for stream in connections))
        took, cpu = time.perf_counter() - began, cpu_s(pid) - awake
        events = sum(stream.events for stream in connections)
        if at:  # the first warms up
            out["tok_s"].append(events / took)
            out["cpu_us_tok"].append(cpu / events * 1e6)
            out["share"].append(cpu / took)
    for stream in connections:
        stream.close()
    return out


@contextmanager
def server(batch: int, *, profile: bool) -> Iterator[tuple[int, int]]:
    """Port and process id of a server."""
    command = [sys.executable, "-m", "benchmarks.server_overhead", "--serve", f"--batch={batch}"]
    with subprocess.Popen(command + ["--profile"] * profile, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rsplit(":", 1)[1]), process.pid
        finally:
            process.terminate()
            print(process.stdout.read(), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--profile", action="store_true", help="print where the server's time goes; no record"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return _serve(arguments.batch, arguments.profile)
    from benchmarks.record import Row, write_record  # it imports torch

    rows = []
    with server(1, profile=False) as (port, _):
        ttft = asyncio.run(first_token_ms(port))
    for route in ROUTES:
        with server(arguments.streams, profile=arguments.profile) as (port, pid):
            found = asyncio.run(waves(port, pid, route, arguments.streams, arguments.rounds))
        print(f"{route}: the server had {100 * sum(found['share']) / len(found['share']):.0f} % of a core")
        goal, name = "the goal of the serving surface", "" if route == "chat" else f"_{route}"
        rows += [
            Row.of(f"server_overhead_tok_s{name}", found["tok_s"], "tokens/s", GOAL_TOK_S, goal),
            Row.of(f"server_overhead_cpu_us_tok{name}", found["cpu_us_tok"], "us/token", 50.0, goal),
            Row.of(f"server_overhead_ttft_ms{name}", ttft[route], "ms", GOAL_TTFT_MS, goal),
        ]
    if arguments.profile:
        for row in rows:
            print(row.metric, row.value)
    else:
        write_record("server_overhead", rows)


def _serve(batch: int, profile: bool) -> None:
    sock = listen(ServerConfig(port=0))
    if not profile:
        asyncio.run(serve_instant(sock, batch))
        return
    with cProfile.Profile(time.thread_time) as watched:
        asyncio.run(serve_instant(sock, batch))
    pstats.Stats(watched, stream=sys.stdout).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
