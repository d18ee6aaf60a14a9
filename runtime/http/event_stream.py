"""Server-sent events of one answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from aiohttp import web

from ostinato.errors import EngineError
from ostinato.runtime.choice_output import Delta
from ostinato.runtime.http.api_errors import error_body
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.client_watch import connection_of

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_COMMENT = b":\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


async def stream_events(
    request: web.Request,
    deltas: AsyncGenerator[tuple[Choice, Delta]],
    render: Callable[[Choice, Delta], bytes],
    closing: Callable[[], bytes],
) -> web.StreamResponse:
    """Send `render` of each delta, then `closing` and `[DONE]`.

    The answer begins with the first delta, so what goes wrong before that is still an HTTP status.  Later
    errors are sent as one event with OpenAI's error object, and the stream ends there, without `[DONE]`.
    """
    response: web.StreamResponse | None = None
    transport = request.transport
    begun, last = False, b""
    try:
        async for choice, delta in deltas:
            if response is None:
                response = await open_stream(request)
            event = render(choice, delta)
            if not begun:
                await response.write(event)  # takes the headers along; they go alone where there is no event
                begun = True
            elif event and not (response.chunked and sent_at_once(transport, event)):
                await response.write(event)
        if response is None:
            response = await open_stream(request)
        last = closing() + DONE
    except ConnectionError:
        raise
    except Exception as error:  # border: the status is sent, so the middleware cannot answer any more
        if response is None:
            raise
        if not isinstance(error, EngineError):
            log.exception("error in a stream")
        last = b"data: " + error_body(error) + b"\n\n"
    if (watched := connection_of(request)) is not None:
        watched.probe = None  # nothing may follow the last chunk
    await response.write_eof(last)
    return response


def sent_at_once(transport: asyncio.Transport | None, event: bytes) -> bool:
    """Send one chunk past aiohttp, which takes thrice as long; False: nothing was sent, aiohttp must do it.

    Only while nothing waits to be sent, so a slow reader still holds back its own answer and no more.
    """
    if transport is None or transport.is_closing() or transport.get_write_buffer_size():
        return False
    transport.write(b"%x\r\n%b\r\n" % (len(event), event))
    return True


class _EventResponse(web.StreamResponse):
    _send_headers_immediately = False  # aiohttp would spend a send of its own on them, and wake the client


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Begin an answer of events, during which a client that ended its sending side is probed.

    The headers wait for the first `write`, which must follow at once: a probe must not overtake them.
    """
    response = _EventResponse(headers=_HEADERS)
    if request.version >= (1, 1):
        response.enable_chunked_encoding()  # aiohttp would do so too, without saying so in `chunked`
    await response.prepare(request)
    watched = connection_of(request)
    if watched is not None and watched.probe is not None:
        framed = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT) if response.chunked else _COMMENT
        watched.probe = lambda: watched.send(framed)
    return response
