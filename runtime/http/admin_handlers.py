"""POST /admin/kv: how much KV memory the engine may hold."""

from __future__ import annotations

from aiohttp import web

from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.http.api_schema import KVTargetRequest
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.server_state import STATE


async def kv_target(request: web.Request) -> web.Response:
    """202: the engine has been told; /metrics shows how far it is. Blocks in use stay until requests end."""
    engine = request.app[STATE].engine
    fields = await read_request(request, KVTargetRequest)
    await engine.set_kv_target(fields.target_bytes)
    answer = {"target_bytes": fields.target_bytes, "committed_bytes": engine.stats.kv_bytes_committed}
    return web.Response(text=dump(answer), status=202, content_type="application/json")
