"""A server whose answers are written by the test: pieces of a body, each at its time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Sequence[tuple[float, bytes]]  # seconds after the request, bytes of the body
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Scripted:
    """A running server: `url` in front; `bodies` of the POSTs that came, by path."""

    url: str
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    peak: int = 0


def plays(script: Script) -> Answer:
    """An answer that sends each piece at its time."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at, piece in script:
            await asyncio.sleep(max(0.0, began + at - loop.time()))
            await response.write(piece)
        return response

    return answer


@asynccontextmanager
async def scripted(
    answers: dict[str, Answer], *, models: bytes = b'{"data": [{"id": "toy"}]}'
) -> AsyncIterator[Scripted]:
    """Serve POST routes, and /v1/models with one model, `toy`, if `models` says nothing else."""

    async def post(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        served.bodies.append((request.path, body))
        served.headers.append(dict(request.headers))
        served.running += 1
        served.peak = max(served.peak, served.running)
        try:
            return await answers[request.path](request, body)
        finally:
            served.running -= 1

    async def listed(request: web.Request) -> web.Response:
        return web.Response(body=models, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", listed)
    for path in answers:
        app.router.add_post(path, post)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # some answers never end
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    served = Scripted(f"http://{host}:{port}")
    try:
        yield served
    finally:
        await runner.cleanup()


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chat(reason: str | None = None, **delta: object) -> dict[str, object]:
    """A chunk of a chat."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def used(completion: int, prompt: int = 7, cached: int | None = None) -> dict[str, object]:
    """The usage chunk."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}
