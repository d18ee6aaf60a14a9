"""POST /admin/sleep, /admin/wake and /admin/kv: the memory of a running engine.

They exist only with `server.admin_key`, which is their key; the API key does not open them.
"""

from __future__ import annotations

from aiohttp import web

from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.http.api_errors import NoAdmin
from ostinato.runtime.http.api_schema import KVTargetRequest, SleepRequest, WakeRequest
from ostinato.runtime.http.bearer_key import has_key
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.server_state import STATE
from ostinato.runtime.messages import EngineState


def admin_routes() -> list[web.RouteDef]:
    """All of them."""
    return [
        web.post("/admin/sleep", sleep),
        web.post("/admin/wake", wake),
        web.post("/admin/kv", kv_target),
    ]


def check_admin(request: web.Request, key: str) -> None:
    """Raise NoAdmin without the key: also for paths under /admin/ that do not exist."""
    if not has_key(request, key):
        raise NoAdmin("missing or wrong admin key; send server.admin_key as `Authorization: Bearer KEY`")


async def sleep(request: web.Request) -> web.Response:
    """Answers when the memory is given back."""
    fields = await read_request(request, SleepRequest)
    return _state(await request.app[STATE].engine.sleep(fields.level))


async def wake(request: web.Request) -> web.Response:
    """Answers when the engine can run steps again. The body may be left out."""
    if request.can_read_body:
        await read_request(request, WakeRequest)
    return _state(await request.app[STATE].engine.wake())


async def kv_target(request: web.Request) -> web.Response:
    """The target counts at once; blocks in use stay until their requests end."""
    fields = await read_request(request, KVTargetRequest)
    return _state(await request.app[STATE].engine.set_kv_target(fields.target_bytes))


def _state(state: EngineState) -> web.Response:
    return web.Response(text=dump(state.model_dump()), content_type="application/json")
