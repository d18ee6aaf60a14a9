"""Which web pages may use this server. Only browsers say where a page comes from (`Origin`).

A page of another origin is refused unless `server.cors_origins` lists it: without that, any page that a user
opens could make their browser spend this server's time, although it could not read the answers.  A server
without API keys also refuses pages whose own name may have been made to point here (DNS rebinding): it
accepts those that were opened by address, by `localhost`, or by a name that only a local network knows.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web

from ostinato.errors import ConfigError, RequestError

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Api-Key, X-Request-Id, traceparent",
    "Access-Control-Max-Age": "600",
}
_LOCAL_ENDINGS = (".localhost", ".local")


class ForeignOrigin(RequestError):
    """The request comes from a web page that may not use this server."""


class WebOrigins:
    """The rule of one server."""

    def __init__(self, allowed: Sequence[str], *, needs_key: bool, host: str) -> None:
        self._any = "*" in allowed
        self._allowed = frozenset(_normal(origin) for origin in allowed if origin != "*")
        self._needs_key = needs_key
        self._host = host

    def check(self, request: web.Request) -> str | None:
        """The origin to answer with when it is an allowed other one; ForeignOrigin when it is not allowed."""
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        if self._any or origin.lower() in self._allowed:
            return origin
        if not self._is_own(origin, request.headers.get("Host", "")):
            shown = "".join(char if char.isprintable() else "?" for char in origin[:100])
            raise ForeignOrigin(
                f"pages of {shown} may not use this server; its operator can list them in server.cors_origins"
            )
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if not name or parts.netloc.lower() != host.lower():
            return False
        return self._needs_key or name == self._host.lower() or _is_local(name)


def preflight(request: web.Request) -> web.Response | None:
    """The answer to a browser that asks what it may send, if `request` is that question."""
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return None
    return web.Response(status=204, headers=_PREFLIGHT)


def allow(response: web.StreamResponse, origin: str) -> None:
    """Let pages of `origin` read this answer."""
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
    response.headers["Vary"] = "Origin"


def _normal(origin: str) -> str:
    if origin == "null":
        return origin
    parts = urlsplit(origin)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or f"{parts.scheme}://{parts.netloc}" != origin
    ):
        raise ConfigError(
            f"server.cors_origins={origin}: an origin is scheme://host or scheme://host:port, without a path"
        )
    return origin.lower()


def _is_local(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_LOCAL_ENDINGS)
    return True
