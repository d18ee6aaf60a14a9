"""The web page at `/`: a few files of this package, served as they are.

They hold no secret, so they need no key; what the page shows it asks of routes that do. Nothing but the
files that were read at start can be asked for, whatever a path says.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import ETag, web

from ostinato.runtime.http.api_errors import UnknownRoute
from ostinato.runtime.http.live_status import LiveStatus

FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup, not even by a mistake of ours
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked for again: 304 unless the server was updated
}


class _File(NamedTuple):
    body: bytes
    kind: str
    tag: str


def page_paths() -> frozenset[str]:
    """Every path of the page; they need no API key."""
    return frozenset({"/", *(f"/page/{path.name}" for path in FOLDER.iterdir() if path.suffix in _TYPES)})


def add_page_routes(app: web.Application) -> None:
    """The page, and `GET /status` which it asks once a second."""
    files = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}
    status = LiveStatus()

    async def index(request: web.Request) -> web.Response:
        """The web page: chat and live view."""
        return _answer(request, files["index.html"])

    async def file(request: web.Request) -> web.Response:
        """A style, script or picture of the web page."""
        found = files.get(request.match_info["name"])
        if found is None:
            raise UnknownRoute(f"no such path: {request.method} {request.path[:200]}")
        return _answer(request, found)

    app.add_routes(
        [web.get("/", index), web.get("/page/{name}", file), web.get("/status", status.answer)],
    )


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])


def _answer(request: web.Request, file: _File) -> web.Response:
    known = request.if_none_match or ()
    if any(tag.value in (file.tag, "*") for tag in known):
        response = web.Response(status=304, headers=_HEADERS)
    else:
        response = web.Response(body=file.body, content_type=file.kind, charset="utf-8", headers=_HEADERS)
    response.etag = ETag(file.tag)
    return response
