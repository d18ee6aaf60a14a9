"""The routes under /admin/: memory of a running engine, its prefix cache, its requests, profiles of it.

They exist only with `server.admin_key`, which is their key; the API key does not open them.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from aiohttp import web

from ostinato.runtime.http.api_errors import NoAdmin
from ostinato.runtime.http.api_schema import (
    AbortRequest,
    KVTargetRequest,
    ResetPrefixRequest,
    SleepRequest,
    StartProfileRequest,
    StopProfileRequest,
    WakeRequest,
)
from ostinato.runtime.http.bearer_key import has_key
from ostinato.runtime.http.json_response import json_response
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.server_state import STATE, answer_of
from ostinato.runtime.http.wire import Wire
from ostinato.runtime.messages import EngineState

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Wire)


def admin_routes() -> list[web.RouteDef]:
    """All of them."""
    return [
        web.post("/admin/sleep", sleep),
        web.post("/admin/wake", wake),
        web.post("/admin/kv", kv_target),
        web.post("/admin/reset_prefix_cache", reset_prefix_cache),
        web.post("/admin/abort", abort),
        web.post("/admin/profile/start", start_profile),
        web.post("/admin/profile/stop", stop_profile),
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
    await _read_optional(request, WakeRequest)
    return _state(await request.app[STATE].engine.wake())


async def kv_target(request: web.Request) -> web.Response:
    """The target counts at once; blocks in use stay until their requests end."""
    fields = await read_request(request, KVTargetRequest)
    return _state(await request.app[STATE].engine.set_kv_target(fields.target_bytes))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """No later request finds what was computed so far. The body may be left out."""
    await _read_optional(request, ResetPrefixRequest)
    return json_response({"blocks": await request.app[STATE].engine.reset_prefix_cache()})


async def abort(request: web.Request) -> web.Response:
    """Answers when the requests have ended, which their clients are told, and their KV blocks are back."""
    state, fields = request.app[STATE], await read_request(request, AbortRequest)
    given = {name: state.sequences_of(name) for name in fields.request_ids or ()}
    found = list(state.live) if fields.all else [one for some in given.values() for one in some]
    await state.engine.end_requests(None if fields.all else found)
    aborted = list(dict.fromkeys(answer_of(sequence) for sequence in found))
    log.warning("%d answers aborted by an operator", len(aborted))
    return json_response({"aborted": aborted, "unknown": [name for name, some in given.items() if not some]})


async def start_profile(request: web.Request) -> web.Response:
    """Records what the engine's process does. The body may be left out."""
    fields = await _read_optional(request, StartProfileRequest)
    return json_response({"seconds": await request.app[STATE].engine.start_profile(fields.seconds)})


async def stop_profile(request: web.Request) -> web.Response:
    """Answers when the trace is written; no step runs meanwhile. The body may be left out."""
    await _read_optional(request, StopProfileRequest)
    return json_response({"file": await request.app[STATE].engine.stop_profile()})


async def _read_optional(request: web.Request, schema: type[W]) -> W:
    """No body is an empty object."""
    return await read_request(request, schema) if request.can_read_body else schema()


def _state(state: EngineState) -> web.Response:
    return json_response(state.model_dump())
