"""Server-sent events that have names, as the Responses and Messages APIs send them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable

from aiohttp import web

from ostinato.errors import EngineError
from ostinato.runtime.http.client_watch import connection_of
from ostinato.runtime.http.event_stream import open_stream, sent_at_once

log = logging.getLogger(__name__)


def frame(name: str, payload: str) -> bytes:
    """One event; `payload` is JSON without line ends."""
    return f"event: {name}\ndata: {payload}\n\n".encode()


async def stream_frames(
    request: web.Request, frames: AsyncGenerator[bytes], failed: Callable[[Exception], bytes]
) -> web.StreamResponse:
    """Send frames as they come; there is no `[DONE]`, the last event says that it is the last.

    The answer begins with the first frame: what goes wrong before is raised, and becomes an HTTP status.  A
    later error is sent as `failed` words it.
    """
    response: web.StreamResponse | None = None
    transport = request.transport
    begun, last = False, b""
    try:
        async for some in frames:
            if response is None:
                response = await open_stream(request)
            if not begun:
                await response.write(some)  # takes the headers along
                begun = True
            elif some and not (response.chunked and sent_at_once(transport, some)):
                await response.write(some)
        if response is None:
            response = await open_stream(request)
    except ConnectionError:
        raise
    except Exception as error:  # border: the status is sent, so the middleware cannot answer any more
        if response is None:
            raise
        if not isinstance(error, EngineError):
            log.exception("error in a stream")
        last = failed(error)
    if (watched := connection_of(request)) is not None:
        watched.probe = None  # nothing may follow the last chunk
    await response.write_eof(last)
    return response
