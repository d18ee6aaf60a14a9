"""GET /openapi.json: an OpenAPI 3.1 document of the routes that this server has, made from their schemas.

Which routes there are is read off the application; `ROUTES` says what they take and give. What JSON Schema
cannot say (rules that concern several fields, the model's vocabulary) is in the descriptions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import ostinato
from ostinato.runtime.http import answer_schema as answers
from ostinato.runtime.http.api_schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    KVTargetRequest,
    ResetPrefixRequest,
    SleepRequest,
    StartProfileRequest,
    StopProfileRequest,
    TokenizeRequest,
    WakeRequest,
)
from ostinato.runtime.http.live_status import Status
from ostinato.runtime.http.messages_schema import CountRequest, MessagesRequest
from ostinato.runtime.http.openapi_failures import failures
from ostinato.runtime.http.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from ostinato.runtime.http.responses_schema import InputTokensRequest, ResponsesRequest
from ostinato.runtime.http.server_state import STATE
from ostinato.runtime.http.wire import Wire
from ostinato.runtime.messages import EngineState

Json = dict[str, Any]  # Any: JSON

_REF = "#/components/schemas/{model}"
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


class Route(NamedTuple):
    """What a route takes and gives."""

    answer: type[BaseModel]
    body: type[Wire] | None = None
    streams: bool = False
    body_required: bool = True
    media: str = "application/json"
    is_open: bool = False  # needs no key
    query: tuple[tuple[str, Json], ...] = ()  # name and schema of parameters behind `?`


_OBJECT = answers.Anything
_REQUEST_ID: Json = {"required": True, "schema": {"type": "string"}}
# Of a stream: each event by itself.
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}
ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/v1/chat/completions"): Route(answers.ChatAnswer, ChatRequest, streams=True),
    ("POST", "/v1/completions"): Route(answers.TextAnswer, CompletionRequest, streams=True),
    ("POST", "/v1/responses"): Route(_OBJECT, ResponsesRequest, streams=True),
    ("POST", "/v1/responses/input_tokens"): Route(answers.ResponseInputTokens, InputTokensRequest),
    ("GET", "/v1/responses/{id}"): Route(
        _OBJECT,
        streams=True,
        query=(
            ("stream", {"type": "boolean"}),
            ("starting_after", {"type": "integer", "minimum": 0, "maximum": 2**31}),
        ),
    ),
    ("DELETE", "/v1/responses/{id}"): Route(_OBJECT),
    ("POST", "/v1/responses/{id}/cancel"): Route(_OBJECT),
    ("GET", "/v1/responses/{id}/input_items"): Route(
        _OBJECT,
        query=(
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            ("order", {"enum": ["asc", "desc"]}),
            ("after", {"type": "string"}),
        ),
    ),
    ("POST", "/v1/messages"): Route(_OBJECT, MessagesRequest, streams=True),
    ("POST", "/v1/messages/count_tokens"): Route(answers.InputTokens, CountRequest),
    ("POST", "/v1/embeddings"): Route(answers.Embeddings, EmbeddingRequest),
    **{("POST", path): Route(answers.Scores, ScoreRequest) for path in ("/v1/score", "/score")},
    **{
        ("POST", path): Route(answers.Ranking, RerankRequest)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    ("GET", "/v1/models"): Route(answers.ModelList),
    ("GET", "/v1/models/{name}"): Route(answers.ModelCard),
    ("POST", "/tokenize"): Route(answers.Tokens, TokenizeRequest),
    ("POST", "/detokenize"): Route(answers.PlainText, DetokenizeRequest),
    ("GET", "/health"): Route(answers.Health, is_open=True),
    ("GET", "/metrics"): Route(_OBJECT, media="text/plain", is_open=True),
    ("GET", "/config"): Route(_OBJECT),
    ("GET", "/version"): Route(answers.Version, is_open=True),
    ("GET", "/openapi.json"): Route(_OBJECT),
    ("GET", "/status"): Route(Status),
    ("GET", "/"): Route(_OBJECT, media="text/html", is_open=True),
    ("GET", "/page/{name}"): Route(_OBJECT, media="*/*", is_open=True),
    ("POST", "/admin/sleep"): Route(EngineState, SleepRequest),
    ("POST", "/admin/wake"): Route(EngineState, WakeRequest, body_required=False),
    ("POST", "/admin/kv"): Route(EngineState, KVTargetRequest),
    ("POST", "/admin/reset_prefix_cache"): Route(
        answers.ForgottenBlocks, ResetPrefixRequest, body_required=False
    ),
    ("POST", "/admin/abort"): Route(answers.Aborted, AbortRequest),
    ("POST", "/admin/profile/start"): Route(answers.ProfileLimit, StartProfileRequest, body_required=False),
    ("POST", "/admin/profile/stop"): Route(answers.ProfileTrace, StopProfileRequest, body_required=False),
}


class Document:
    """The document of one application; made when it is asked for first."""

    def __init__(self, app: web.Application) -> None:
        self._app = app

    @cached_property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(document(self._app), ensure_ascii=False)


DOCUMENT: web.AppKey[Document] = web.AppKey("ostinato_openapi", Document)


async def openapi(request: web.Request) -> web.Response:
    """This document."""
    return web.Response(text=request.app[DOCUMENT].text, content_type="application/json")


def document(app: web.Application) -> Json:
    """OpenAPI 3.1 of the application's routes."""
    state = app[STATE]
    served = list(_served(app))
    models: set[type[BaseModel]] = {answers.Error}
    models |= {route.answer for *_, route in served}
    models |= {route.body for *_, route in served if route.body is not None}
    several: list[tuple[type[BaseModel], Any]] = [  # Any: the library's literal
        (model, "validation") for model in sorted(models, key=lambda one: one.__qualname__)
    ]
    refs, definitions = models_json_schema(several, ref_template=_REF)
    schemas: Json = definitions["$defs"]
    names = {model: refs[model, mode]["$ref"].rsplit("/", 1)[1] for model, mode in several}
    for model, name in names.items():
        if issubclass(model, Wire):
            schemas[name]["properties"] |= _other_fields(model)
    has_keys = state.keys.everybody is None
    paths: Json = {}
    for method, path, said, route in served:
        needs_key = has_keys and not route.is_open and not path.startswith("/admin/")
        operation = _operation(method, path, said, route, names, needs_key=needs_key)
        if path.startswith("/admin/"):
            operation["security"] = [{"adminKey": []}]
        elif needs_key:
            operation["security"] = [{"apiKey": []}, {"xApiKey": []}]
        paths.setdefault(path, {})[method.lower()] = operation
    bearer = {"type": "http", "scheme": "bearer"}
    made: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": f"{state.model} by ostinato",
            "version": ostinato.__version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "apiKey": bearer,
                "xApiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
                "adminKey": bearer,
            },
        },
    }
    _correct(made)
    return made


def _served(app: web.Application) -> Iterator[tuple[str, str, str, Route]]:
    """Method, path, first line about the handler, and what we know of it."""
    for route in app.router.routes():
        if route.method in ("HEAD", "OPTIONS") or route.resource is None:
            continue
        path = re.sub(r"\{(\w+)(?::[^}]*)?\}", r"{\1}", route.resource.canonical)
        said = (route.handler.__doc__ or "").strip().partition("\n")[0]
        yield route.method, path, said, ROUTES.get((route.method, path), Route(_OBJECT))


def _operation(
    method: str, path: str, said: str, route: Route, names: dict[type[BaseModel], str], *, needs_key: bool
) -> Json:
    def content(model: type[BaseModel], media: str) -> Json:
        return {media: {"schema": {"$ref": _REF.format(model=names[model])}}}

    is_text = route.media != "application/json"
    good = {route.media: {"schema": {"type": "string"}}} if is_text else {}
    good = good or content(route.answer, route.media)
    if route.streams:
        good |= {"text/event-stream": {"schema": _EVENT}}
    failed = {
        str(status): {"description": codes, "content": content(answers.Error, "application/json")}
        for status, codes in failures(
            method, path, has_body=route.body is not None, needs_key=needs_key
        ).items()
    }
    if path == "/health":  # 503 is a state or, in front of the handler, an error
        either = [_REF.format(model=names[model]) for model in (answers.Health, answers.Error)]
        failed["503"]["content"] = {
            "application/json": {"schema": {"anyOf": [{"$ref": ref} for ref in either]}}
        }
    operation: Json = {
        "summary": said,
        "operationId": re.sub(r"\W+", "_", f"{method} {path}").strip("_").lower(),
        "responses": {
            status: {**said, "headers": {"X-Request-Id": _REQUEST_ID}}
            for status, said in ({"200": {"description": "the answer", "content": good}} | failed).items()
        },
    }
    text = {"type": "string", "minLength": 1}
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        body = content(route.body, "application/json")
        operation["requestBody"] = {"required": route.body_required, "content": body}
    return operation


def _other_fields(model: type[Wire]) -> Json:
    """Fields that a schema does not have and that are accepted all the same."""
    fields: Json = {name: {"description": "without effect"} for name in sorted(model.ignored)}
    for name, accepted in sorted(model.unsupported.items()):
        fields[name] = {"enum": [None, *accepted], "description": "not supported: anything else is refused"}
    return {name: schema for name, schema in fields.items() if name not in model.model_fields}


def _correct(node: object) -> None:
    """Bounds by the names of JSON Schema; branches of unions may overlap, which `oneOf` forbids."""
    if isinstance(node, list):
        for item in node:
            _correct(item)
    if not isinstance(node, dict):
        return
    for name, proper in _LIMITS.items():
        if isinstance(node.get(name), int | float) and "type" in node:
            node[proper] = node.pop(name)
    if "oneOf" in node:
        node["anyOf"] = node.pop("oneOf")
        node.pop("discriminator", None)
    for item in node.values():
        _correct(item)
