"""aiohttp's protocol, except that bytes which are no HTTP get the API's error body and one line of log."""

from __future__ import annotations

import asyncio
import logging
import uuid

from aiohttp import web

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.api_errors import error_body

log = logging.getLogger(__name__)


class HttpConnection(web.RequestHandler):
    """One connection of `web.Server`. Errors of handlers never come here: the application answers them."""

    __slots__ = ()

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(manager, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: write none

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be parsed; the connection ends with it."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; no other can be sent")
        error: Exception
        if status != 400:
            error = exc if isinstance(exc, Exception) else RuntimeError(message or f"status {status}")
            log.error("a request from %s failed outside its handler", request.remote, exc_info=error)
        else:
            raw = " ".join((message or str(exc)).split())  # may hold what the client sent
            said = "".join(char if char.isprintable() else "?" for char in raw)
            error = InvalidRequest(f"malformed HTTP: {said}")
            log.warning("malformed HTTP from %s: %s", request.remote, said[:200])
        response = web.Response(
            body=error_body(error),
            status=status,
            content_type="application/json",
            headers={"X-Request-Id": uuid.uuid4().hex},
        )
        response.force_close()
        return response
