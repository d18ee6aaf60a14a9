"""A server on a real port over a real engine of a toy model that embeds or scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from ostinato.runtime.config import CpuConfig, EngineConfig, SchedulerConfig, ServerConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from ostinato.runtime.http.server_state import STATE
from ostinato.runtime.text import TextFrontEnd
from tests.support.serving import Served
from tests.support.tiny_encoders import tokenizer
from tests.support.toy_pool_model import ToyPoolModel


@asynccontextmanager
async def pool_serving(
    model: ToyPoolModel, *, max_waiting: int = 4096, **settings: Any
) -> AsyncIterator[Served]:
    """Serve `model` on a free port of this machine. `settings` are those of ServerConfig."""
    server = ServerConfig(port=0, **{"drain_s": 1.0, "served_name": "toy", **settings})
    config = EngineConfig(
        cpu=CpuConfig(threads=1, bind=False),
        scheduler=SchedulerConfig(max_waiting=max_waiting, max_step_tokens=32),
        server=server,
    )
    engine = EngineThread("toy", config, load=lambda folder, config: model)  # type: ignore[arg-type,return-value]
    app = make_app(engine, server, TextFrontEnd(tokenizer()))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, listen(server), on_ready=ready.set_result, stop=stop))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    async with aiohttp.ClientSession() as http:
        try:
            yield Served(engine, app[STATE], ready.result(), http, stop, task, app)  # type: ignore[arg-type]
        finally:
            if model.gate is not None:
                model.gate.set()
            stop.set()
            await task
