"""Errors in the form of Anthropic's API."""

from __future__ import annotations

import json

from aiohttp import web

from ostinato.runtime.http.api_errors import answer_for, error_body

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def wants_anthropic(request: web.Request) -> bool:
    """Whether errors of this request are Anthropic's: under /v1/messages, and for its clients anywhere."""
    path = request.path
    return (
        path == "/v1/messages" or path.startswith("/v1/messages/") or "anthropic-version" in request.headers
    )


def anthropic_error_body(error: Exception, request_id: str) -> bytes:
    """The error object as JSON; `param` and `code` of the other routes are there too."""
    told = json.loads(error_body(error))["error"]
    kind = _KINDS.get(answer_for(error).status, "api_error")
    inner = {"type": kind, "message": told["message"], "param": told["param"], "code": told["code"]}
    if told["param"] == "thread":  # the client's tool runner then sends the whole conversation itself
        inner["details"] = {"error_code": "thread_unsupported_request"}
    body = {"type": "error", "error": inner, "request_id": request_id}
    return json.dumps(body, ensure_ascii=False).encode()
