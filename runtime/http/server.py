"""The aiohttp application: routes, who may call them, how errors look, how it starts and stops.

No torch here: this process moves token ids and text.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import HttpVersion10, HttpVersion11, web

import ostinato
from ostinato.errors import EngineDead, InvalidRequest
from ostinato.runtime.client import EngineClient
from ostinato.runtime.config import EngineConfig, ServerConfig
from ostinato.runtime.http import access_log
from ostinato.runtime.http.access_log import AccessLog
from ostinato.runtime.http.admin_handlers import admin_routes, check_admin
from ostinato.runtime.http.api_errors import (
    BadKey,
    BodyTooLarge,
    UnknownRoute,
    WrongMethod,
    answer_for,
    error_body,
)
from ostinato.runtime.http.api_keys import Caller, KeyRing
from ostinato.runtime.http.bearer_key import key_of
from ostinato.runtime.http.body_room import BodyRoom
from ostinato.runtime.http.chat_format import shows_tools
from ostinato.runtime.http.chat_handler import chat_completions
from ostinato.runtime.http.completion_handler import completions
from ostinato.runtime.http.embedding_handler import embeddings
from ostinato.runtime.http.key_limits import RateLimited
from ostinato.runtime.http.messages_errors import anthropic_error_body, wants_anthropic
from ostinato.runtime.http.messages_handler import count_tokens, create_message
from ostinato.runtime.http.metrics import ServerMetrics
from ostinato.runtime.http.openapi import DOCUMENT, Document, openapi
from ostinato.runtime.http.page_handler import add_page_routes, page_paths
from ostinato.runtime.http.request_record import CURRENT, RequestRecord
from ostinato.runtime.http.responses_handler import add_response_routes
from ostinato.runtime.http.score_handler import rerank, score
from ostinato.runtime.http.server_state import REQUEST_ID, STATE, ServerState
from ostinato.runtime.http.status_handlers import config as show_config
from ostinato.runtime.http.status_handlers import health, metrics, model, models, version
from ostinato.runtime.http.token_handlers import detokenize, tokenize
from ostinato.runtime.http.tracing import Tracing
from ostinato.runtime.http.web_origins import WebOrigins, allow, preflight
from ostinato.runtime.text import TextFrontEnd

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# These need no API key: probes and scrapers have none, and the page asks for one.
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"}) | page_paths()
CLIENT_LEFT = 499  # before it had an answer; nginx counts it so
ABORT_WAIT_S = 5.0  # for aborted requests to be answered
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ALLOWED_ORIGIN: web.RequestKey[str] = web.RequestKey("ostinato_allowed_origin", str)
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(
    engine: EngineClient,
    config: ServerConfig,
    text: TextFrontEnd,
    *,
    engine_config: EngineConfig | None = None,
) -> web.Application:
    """The application. It starts and closes `engine` with itself; `/config` shows `engine_config`.

    Run it with `serve_app.serve`: other runners work too, but there a client that ends its sending side at
    once may be taken for gone.
    """

    def stalled_s() -> float:
        try:
            return engine.stalled_seconds
        except EngineDead:
            return float("inf")

    app = web.Application(
        client_max_size=int(config.max_body_mib * 2**20),
        middlewares=[_answer_errors, _check_origin, _check_key],
    )
    keys = KeyRing.of(config)
    text.template_timeout_s = config.template_timeout_s
    if config.chat_template:
        text.use_template(config.chat_template)
    if config.access_log != "off":
        access_log.setup()
    app[STATE] = ServerState(
        engine=engine,
        config=config,
        text=text,
        metrics=ServerMetrics(lambda: engine.stats, stalled_s),
        engine_config=engine_config,
        keys=keys,
        origins=WebOrigins(config.cors_origins, needs_key=keys.everybody is None, host=config.host),
        bodies=BodyRoom(int(config.max_bodies_mib * 2**20)),
        access_log=AccessLog(config.access_log),
        tracing=Tracing(config.trace_endpoint) if config.trace_endpoint else None,
    )
    state = app[STATE]
    state.metrics.watch(state.connections, state.bodies)
    formats, _ = state.formats, state.thought_marks  # what is wrong in the settings is known now
    log.info(
        "reasoning parser: %s, tool parser: %s",
        formats.reasoning.name if formats.reasoning is not None else "none",
        formats.tools.name if formats.tools is not None else "none",
    )
    can_show = config.allow_chat_template or shows_tools(text.chat_template or "")
    if config.tool_parser not in ("auto", "none") and not can_show:
        log.warning(
            "server.tool_parser=%s: no effect, the model's chat template does not show tools; give one that "
            "does as server.chat_template",
            config.tool_parser,
        )
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/messages", create_message),
            web.post("/v1/messages/count_tokens", count_tokens),
            web.post("/v1/embeddings", embeddings),
            *(web.post(path, score) for path in ("/v1/score", "/score")),
            *(web.post(path, rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/config", show_config),
            web.get("/version", version),
            web.get("/openapi.json", openapi),
            *(admin_routes() if config.admin_key else ()),
        ]
    )
    app.cleanup_ctx.append(_engine_lifetime)
    app.on_shutdown.append(drain)
    add_response_routes(app)
    add_page_routes(app)
    app.on_response_prepare.append(_name_request)
    app[DOCUMENT] = Document(app)
    return app


async def _engine_lifetime(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    await state.engine.start()
    state.metrics.describe_server(state.model, ostinato.__version__, state.engine.info.dtype)
    try:
        yield
    finally:
        await state.engine.close()
        state.text.close()
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.close)


async def drain(app: web.Application) -> None:
    """Refuse new work, let running requests finish for `drain_s` seconds, then abort the rest."""
    state = app[STATE]
    state.draining = True
    if state.live:
        log.info("shutting down: %d sequences get %g s to finish", len(state.live), state.config.drain_s)
    if await _idle_within(state, state.config.drain_s, lambda: state.hurries):
        return
    log.warning("shutting down: aborting %d sequences", len(state.live))
    await state.engine.abort(list(state.live))
    await _idle_within(state, ABORT_WAIT_S, lambda: False)


async def _idle_within(state: ServerState, seconds: float, gives_up: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while state.live and time.monotonic() < end and not gives_up():
        await asyncio.sleep(0.01)
    return not state.live


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: request id, one error format, one line of log, one trace."""
    given = request.headers.get("X-Request-Id", "")
    request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
    request[REQUEST_ID] = request_id
    record, status = RequestRecord(request_id), CLIENT_LEFT
    CURRENT.set(record)  # in this request's own task
    try:
        if request.version not in (HttpVersion10, HttpVersion11):
            raise InvalidRequest("only HTTP/1.1 and HTTP/1.0 are spoken here")
        response = await handler(request)
        status = response.status
    except ConnectionError:
        return web.Response(status=CLIENT_LEFT)  # goes nowhere; raised, aiohttp would log it as our failure
    except Exception as error:  # border: whatever goes wrong becomes one error body
        response = _error_response(error, request)
        status = response.status
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        _tell(request, record, route, status)
    return response


def _tell(request: web.Request, record: RequestRecord, route: str, status: int) -> None:
    """Metrics, access log and trace of a request that is over."""
    state = request.app[STATE]
    method = request.method if request.method in _METHODS else "other"
    state.metrics.answered(route, status, record)
    state.access_log.write(record, method=method, route=route, status=status, client=request.remote)
    if state.tracing is not None:
        state.tracing.tell(record, request.headers, name=f"{method} {route}", status=status)


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers["X-Request-Id"] = request_id
        response.headers["Server"] = "ostinato"  # aiohttp would tell its version and Python's
        if wants_anthropic(request):
            response.headers["request-id"] = request_id
    if (origin := request.get(_ALLOWED_ORIGIN)) is not None:
        allow(response, origin)


def _error_response(error: Exception, request: web.Request) -> web.Response:
    headers = {}
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        error = WrongMethod(f"{request.method} is not allowed here; use {headers['Allow']}")
    elif isinstance(error, web.HTTPNotFound):
        error = UnknownRoute(f"no such path: {request.method} {request.path[:200]}{_meant(request)}")
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        error = BodyTooLarge(str(error.text))
    elif isinstance(error, web.HTTPException):
        raise error  # redirects; there are none
    status = answer_for(error).status
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, RateLimited) else 1.0
        headers["Retry-After"] = str(math.ceil(wait_s))
    if status == 500:
        log.error("request %s failed", request[REQUEST_ID], exc_info=error)
    anthropic = wants_anthropic(request)
    body = anthropic_error_body(error, request[REQUEST_ID]) if anthropic else error_body(error)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _meant(request: web.Request) -> str:
    """For clients whose base address has too much or too little in it: the longest path that fits theirs."""
    path = request.path
    known = {resource.canonical for resource in request.app.router.resources()}
    near = [
        one
        for one in known
        if one.startswith("/v1/")
        and (one == f"/v1{path}" or path.endswith(one) or path.startswith(f"{one}/"))
    ]
    if not near:
        return ""
    return f"; did you mean {max(near, key=len)}? See the base address that your client is given"


@web.middleware
async def _check_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse pages of foreign origins; answer what browsers ask before they send a key."""
    origin = request.app[STATE].origins.check(request)
    if origin is not None:
        request[_ALLOWED_ORIGIN] = origin
        if (answer := preflight(request)) is not None:
            return answer
    return await handler(request)


@web.middleware
async def _check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who calls, and whether they may now. Only POST does work that is worth limiting."""
    state = request.app[STATE]
    if state.config.admin_key and request.path.startswith("/admin/"):
        check_admin(request, state.config.admin_key)
        return await handler(request)
    if request.path in OPEN_PATHS:
        return await handler(request)
    caller = _caller(request, state.keys)
    if (record := CURRENT.get()) is not None:
        record.caller = caller
    if request.method != "POST":
        return await handler(request)
    try:
        caller.allowance.enter()
    except RateLimited as error:
        state.metrics.limited(caller.name, error.limit)
        raise
    try:
        return await handler(request)
    finally:
        caller.allowance.leave()


def _caller(request: web.Request, keys: KeyRing) -> Caller:
    if (everybody := keys.everybody) is not None:
        return everybody
    given = key_of(request)
    caller = keys.find(given) if given else None
    if caller is None:
        raise BadKey("missing or wrong API key; send it as `Authorization: Bearer KEY`")
    return caller
