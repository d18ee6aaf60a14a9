"""A server on a real port with a fake engine behind it, and ways to talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from aiohttp import web

from ostinato.runtime.config import ServerConfig
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.text import TextFrontEnd
from tests.support.fake_engine import FakeEngine, Script, info
from tests.support.toy_text import front_end


@dataclass
class Served:
    """A running server: `engine` behind it, `url` in front."""

    engine: FakeEngine
    state: ServerState
    url: str
    http: aiohttp.ClientSession
    stop: asyncio.Event
    task: asyncio.Task[None]
    app: web.Application

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one POST."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=BytesIO(raw), headers=headers) as response:
            return response.status, json.loads(await response.read(), parse_constant=_not_json)

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and JSON of one GET."""
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, object]) -> list[Any]:
        """All events of a stream; `[DONE]` stays a string."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            raw = (await response.read()).decode()
        blocks = raw.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [
            block[6:] if block == "data: [DONE]" else json.loads(block[6:], parse_constant=_not_json)
            for block in blocks
        ]


@asynccontextmanager
async def serving(
    script: Script, *, text: TextFrontEnd | None = None, window: int = 64, **settings: Any
) -> AsyncIterator[Served]:
    """Serve `script` on a free port of this machine. `settings` are those of ServerConfig."""
    engine = FakeEngine(script, info(vocab_size=410, max_model_len=window, eos=1))
    async with serving_engine(engine, text=text, **settings) as served:
        try:
            yield served
        finally:
            if engine.gate is not None:
                engine.gate.set()


@asynccontextmanager
async def serving_engine(
    engine: Any, *, text: TextFrontEnd | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """The same in front of any EngineClient."""
    config = ServerConfig(port=0, **{"drain_s": 1.0, **settings})
    app = make_app(engine, config, text or front_end())
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, listen(config), on_ready=ready.set_result, stop=stop))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    url = ready.result()
    async with aiohttp.ClientSession() as http:
        try:
            yield Served(engine, app[STATE], url, http, stop, task, app)
        finally:
            stop.set()
            await task


def _not_json(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")
