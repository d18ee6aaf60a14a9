"""GET /v1/models, /health, /metrics, /config and /version."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

import ostinato
from ostinato.errors import EngineDead
from ostinato.runtime.config import EngineConfig, without_secrets
from ostinato.runtime.http.json_response import json_response
from ostinato.runtime.http.server_state import STATE, ServerState


async def models(request: web.Request) -> web.Response:
    """The one model, in a list that is OpenAI's and Anthropic's at once."""
    one = _model(request.app[STATE])
    pages = {"has_more": False, "first_id": one["id"], "last_id": one["id"]}
    return json_response({"object": "list", "data": [one], **pages})


async def model(request: web.Request) -> web.Response:
    """The model by name."""
    state = request.app[STATE]
    state.check_model(request.match_info["name"])
    return json_response(_model(state))


async def health(request: web.Request) -> web.Response:
    """200 while the engine makes progress, has nothing to do or sleeps; 503 with the reason otherwise."""
    state = request.app[STATE]
    try:
        stalled_s = state.engine.stalled_seconds
    except EngineDead as error:
        return json_response({"status": "dead", "reason": str(error)[:600]}, status=503)
    stats = state.engine.stats
    facts = {"running": stats.running, "waiting": stats.waiting, "stalled_seconds": round(stalled_s, 3)}
    if stalled_s > state.config.stall_s:
        limit = f"server.stall_s={state.config.stall_s:g}"
        reason = f"no engine step for {stalled_s:.1f} s while requests wait ({limit})"
        return json_response({"status": "stalled", "reason": reason, **facts}, status=503)
    if stats.asleep:
        return json_response({"status": "asleep", "level": stats.asleep, **facts})
    if state.draining:
        return json_response(
            {"status": "draining", "reason": "the server is shutting down", **facts}, status=503
        )
    return json_response({"status": "ok", **facts})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text format."""
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=request.app[STATE].metrics.render(), headers=headers)


async def config(request: web.Request) -> web.Response:
    """Every setting in use. Secrets are starred."""
    state = request.app[STATE]
    engine_config = state.engine_config or EngineConfig()
    safe = without_secrets(engine_config.model_copy(update={"server": state.config}))
    whole = safe.model_dump(mode="json", include=None if state.engine_config else {"server"})
    return json_response(whole)


async def version(request: web.Request) -> web.Response:
    """Version of ostinato."""
    return json_response({"version": ostinato.__version__})


def _model(state: ServerState) -> dict[str, object]:
    return {
        "id": state.model,
        "object": "model",
        "created": state.created,
        "owned_by": "ostinato",
        "max_model_len": state.engine.info.max_model_len,
        "type": "model",  # this and the next two are Anthropic's
        "display_name": state.model,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
    }
