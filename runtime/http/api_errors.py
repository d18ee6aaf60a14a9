"""Exceptions become HTTP answers: one table, one body, at most about 1 KB."""

from __future__ import annotations

import json
from typing import NamedTuple

from pydantic import ValidationError

from ostinato.errors import (
    ContextTooLong,
    EngineDead,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProfileRefused,
    RequestAborted,
    RequestError,
    SleepRefused,
    WakeFailed,
    WrongTask,
)
from ostinato.runtime.http.key_limits import RateLimited
from ostinato.runtime.http.web_origins import ForeignOrigin

MAX_MESSAGE_BYTES = 600
_MAX_PARAM_BYTES = 100


class BadKey(RequestError):
    """The API key is missing or wrong."""


class NoAdmin(RequestError):
    """The admin key is missing or wrong."""


class BodyTooLarge(RequestError):
    """The request body is over `server.max_body_mib`."""


class UnknownRoute(RequestError):
    """No such path."""


class ResponseNotFound(RequestError):
    """No stored response has this id."""


class WrongMethod(RequestError):
    """The path exists, the method does not."""


class BodyTimeout(RequestError):
    """The request body did not arrive within `server.body_timeout_s`."""


class BodyEncoded(RequestError):
    """The request body is compressed."""


class ConnectionsFull(RequestError):
    """`server.max_connections` are open."""


class GenerationTimeout(RequestError):
    """The answer was not complete within `server.request_timeout_s`."""


class Draining(RequestError):
    """The server is shutting down and takes no new work."""


class Answer(NamedTuple):
    """HTTP status and the `type` and `code` of OpenAI's error body."""

    status: int
    kind: str
    code: str | None


# First match wins, so subclasses stand before their parents.
TABLE: tuple[tuple[type[Exception], Answer], ...] = (
    (ContextTooLong, Answer(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, Answer(400, "invalid_request_error", "invalid_value")),
    (BadKey, Answer(401, "authentication_error", "invalid_api_key")),
    (NoAdmin, Answer(403, "permission_error", "invalid_admin_key")),
    (ForeignOrigin, Answer(403, "permission_error", "origin_not_allowed")),
    (WrongTask, Answer(400, "invalid_request_error", "wrong_task")),
    (ModelNotFound, Answer(404, "invalid_request_error", "model_not_found")),
    (ResponseNotFound, Answer(404, "invalid_request_error", "response_not_found")),
    (UnknownRoute, Answer(404, "invalid_request_error", "unknown_url")),
    (WrongMethod, Answer(405, "invalid_request_error", "method_not_allowed")),
    (BodyTimeout, Answer(408, "invalid_request_error", "body_timeout")),
    (SleepRefused, Answer(409, "conflict_error", "sleep_refused")),
    (ProfileRefused, Answer(409, "conflict_error", "profile_refused")),
    (BodyTooLarge, Answer(413, "invalid_request_error", "request_too_large")),
    (BodyEncoded, Answer(415, "invalid_request_error", "unsupported_encoding")),
    (RateLimited, Answer(429, "rate_limit_error", "rate_limited")),
    (Overloaded, Answer(429, "rate_limit_error", "overloaded")),
    (ConnectionsFull, Answer(503, "server_error", "too_many_connections")),
    (Draining, Answer(503, "server_error", "shutting_down")),
    (RequestAborted, Answer(503, "server_error", "aborted")),
    (WakeFailed, Answer(503, "server_error", "wake_failed")),
    (EngineDead, Answer(503, "server_error", "engine_dead")),
    (GenerationTimeout, Answer(504, "server_error", "generation_timeout")),
    (RequestError, Answer(400, "invalid_request_error", None)),
    (EngineError, Answer(500, "server_error", "engine_error")),
)
INTERNAL = Answer(500, "server_error", "internal_error")


def answer_for(error: Exception) -> Answer:
    """How this exception is told to a client."""
    return next((answer for kind, answer in TABLE if isinstance(error, kind)), INTERNAL)


def error_body(error: Exception) -> bytes:
    """OpenAI's error object as JSON. The text of an unexpected exception stays in the log."""
    answer = answer_for(error)
    message = "internal error; see the server's log" if answer is INTERNAL else str(error)
    param = error.param if isinstance(error, RequestError) else None
    return json.dumps(
        {
            "error": {
                "message": _bounded(message, MAX_MESSAGE_BYTES),
                "type": answer.kind,
                "param": None if param is None else _bounded(param, _MAX_PARAM_BYTES),
                "code": answer.code,
            }
        },
        ensure_ascii=False,
    ).encode()


def refusal(error: ValidationError) -> InvalidRequest:
    """The first complaint of a schema, with the path of the field as a client would write it."""
    complaints = error.errors(include_url=False)
    first = complaints[0]
    context = first.get("ctx", {})
    param = _path((*first["loc"], *([context["at"]] if "at" in context else [])))
    match first["type"]:
        case "extra_forbidden":
            said = "is not a known field"
        case "missing":
            said = "is required"
        case _:
            said = first["msg"][:1].lower() + first["msg"][1:]
            if isinstance(first["input"], bool | int | float | str):
                said += f"; got {json.dumps(first['input'])[:80]}"
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    return InvalidRequest(f"{_bounded(param, _MAX_PARAM_BYTES)}: {said}{more}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "#parts", 1, "type")` -> `messages[0][1].type`; tags of unions start with # and go."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "[key]" or step.startswith("#"):
            continue
        else:
            path += f".{step}" if path else step
    return path


def _bounded(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8 that JSON need not escape."""
    plain = "".join(char if char.isprintable() else " " for char in text[:limit]).encode("utf-8", "replace")
    cut = plain[: limit - 3].decode("utf-8", "ignore") + "…"
    return plain.decode() if len(text) <= limit and len(plain) <= limit else cut
