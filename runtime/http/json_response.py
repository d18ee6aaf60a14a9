"""An answer in one piece."""

from __future__ import annotations

from aiohttp import web

from ostinato.runtime.http.answer_parts import dump


def json_response(value: object, *, status: int = 200) -> web.Response:
    """`value` as JSON; what makes it takes the time of the event loop, so it is small."""
    return web.Response(text=dump(value), status=status, content_type="application/json")
