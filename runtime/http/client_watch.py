"""Knows whether the client of a request is still there, and cancels the request when it is not.

aiohttp closes a connection as soon as the client ends its sending side, although that client may well be
waiting for the answer (`shutdown(SHUT_WR)`, `nc -N`).  A client that closed its socket for good sends the
very same FIN; only what it does with the next bytes tells the two apart: a closed socket answers them with a
reset.  So a watched connection stays open after a FIN while a request is being answered, and is probed with
bytes that every client must ignore: an interim `100 Continue` before the answer has begun, an SSE comment
while events are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web

FIRST_PROBE_S = 0.25  # a short answer is out before; nobody sees a probe then
NEXT_PROBE_S = 0.75
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class WatchedConnection(asyncio.Protocol):
    """Stands between transport and aiohttp's protocol; passes everything on, except the end of input."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._idle_probes = 0
        self.input_ended = False
        self.lost = False
        self.probe: Callable[[], None] | None = None  # set while a request is answered
        self.on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.attach(transport)
        self._inner.connection_made(transport)

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Watch a connection that is already open."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._inner.connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def eof_received(self) -> bool:
        self.input_ended = True
        self._inner.eof_received()
        self._schedule(FIRST_PROBE_S)
        return True  # keep the transport open; `_ask` closes it unless a request is being answered

    def send(self, data: bytes) -> None:
        """Write past aiohttp. Only for bytes that are whole by themselves."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _schedule(self, delay_s: float) -> None:
        self._probe_timer = asyncio.get_running_loop().call_later(delay_s, self._ask)

    def _ask(self) -> None:
        if self.probe is not None:
            self._idle_probes = 0
            self.probe()
        else:
            # Twice idle: no request is on its way to a handler, or its body will never be complete.
            self._idle_probes += 1
            if self._idle_probes > 1 and self._transport is not None:
                self._transport.close()
                return
        self._schedule(NEXT_PROBE_S)


def connection_of(request: web.Request) -> WatchedConnection | None:
    """The watched connection of a request; installed on the spot when the server was not made by `serve`."""
    transport = request.transport
    if transport is None:
        return None
    protocol = transport.get_protocol()
    if not isinstance(protocol, WatchedConnection):
        watched = WatchedConnection(cast(asyncio.Protocol, protocol))
        watched.attach(transport)
        transport.set_protocol(watched)
        return watched
    return protocol


@contextmanager
def cancelled_when_client_leaves(request: web.Request) -> Iterator[None]:
    """Cancel the current task when the client goes away; then ConnectionResetError leaves the block.

    Enter it when the request's body has been read.
    """
    watched, task = connection_of(request), asyncio.current_task()
    if watched is None or task is None or watched.lost:
        raise ConnectionResetError("the client has gone")
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    watched.on_lost = leave
    watched.probe = (lambda: watched.send(_CONTINUE)) if request.version >= (1, 1) else lambda: None
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ConnectionResetError("the client has gone") from None
        raise
    finally:
        watched.on_lost = watched.probe = None
        if watched.input_ended and request.protocol is not None:
            request.protocol.close()  # after this answer: no further request can come
