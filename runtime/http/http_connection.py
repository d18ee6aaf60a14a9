"""aiohttp's protocol, with the API's error body for bytes that are no HTTP, and an end for stalled clients.

A connection is closed when the head of a request is not whole `header_timeout_s` after its first byte (or
after connecting), when the client takes nothing of its answer for `send_timeout_s`, and at once when
`max_connections` are open.  The body of a request has a deadline of its own, in request_body.py.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ostinato.errors import InvalidRequest
from ostinato.runtime.config import ServerConfig
from ostinato.runtime.http.api_errors import ConnectionsFull, error_body

log = logging.getLogger(__name__)


@dataclass
class Connections:
    """Connections of one server."""

    open: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason: full, header_timeout, send_timeout


class HttpConnection(web.RequestHandler):
    """One connection of `web.Server`. Errors of handlers never come here: the application answers them."""

    __slots__ = ("_buffered_bytes", "_config", "_connections", "_counts", "_head_timer", "_send_timer")

    def __init__(
        self,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        config: ServerConfig,
        connections: Connections,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None: write none
            keepalive_timeout=config.keepalive_s,
            auto_decompress=False,  # request_body.py refuses what is compressed
        )
        self._config = config
        self._connections = connections
        self._counts = False  # is one of `connections.open`
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._buffered_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connections = self._connections
        if connections.open >= self._config.max_connections:
            connections.dropped["full"] += 1
            assert self.transport is not None  # made just now
            self.transport.write(_refusal(self._config.max_connections))
            self.force_close()
            return
        connections.open += 1
        self._counts = True
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._send_timer = None
        if self._counts:
            self._connections.open -= 1
            self._counts = False
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._messages and hasattr(self._messages[-1][0], "exc"):  # what came is no HTTP
            self._break_bodies()
        if self._request_count != before:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None and self._current_request is None and not self._messages and data:
            self._start_head_timer()

    def _break_bodies(self) -> None:
        """Nothing more comes of the bodies before broken bytes: whoever reads one must not wait for it."""
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof():
                body.set_exception(web.RequestPayloadError("broken framing"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._config.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._connections.dropped["header_timeout"] += 1
        self.force_close()

    def _start_send_timer(self) -> None:
        self._buffered_bytes = self._unsent_bytes()
        self._send_timer = self._loop.call_later(self._config.send_timeout_s, self._check_sending)

    def _check_sending(self) -> None:
        """Close unless the client took something since the last look."""
        self._send_timer = None
        if self.transport is None:
            return
        if self._unsent_bytes() < self._buffered_bytes:
            self._start_send_timer()
            return
        self._connections.dropped["send_timeout"] += 1
        log.info(
            "a client read nothing for %g s (server.send_timeout_s); dropped", self._config.send_timeout_s
        )
        self.transport.abort()  # closing would wait until it has read the rest

    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def log_exception(self, *args: Any, **kwargs: Any) -> None:  # Any: as the base class has it
        """A body that breaks off behind the answer is the client's business."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            log.error(*args, **kwargs)

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
            reason = said.partition(":")[0]  # what follows are bytes of the client, which may hold a key
            log.warning("malformed HTTP from %s: %s", request.remote, reason[:200])
        response = web.Response(
            body=error_body(error),
            status=status,
            content_type="application/json",
            headers={"X-Request-Id": uuid.uuid4().hex},
        )
        response.force_close()
        return response


def _refusal(limit: int) -> bytes:
    """A whole answer. Nothing was read of the request: it is for a client that sends one anyway."""
    body = error_body(ConnectionsFull(f"{limit} connections are open (server.max_connections); try later"))
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
