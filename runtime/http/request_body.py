"""Reads the body of a request within its limits: bytes of one, bytes of all at once, and time."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ostinato.errors import InvalidRequest, Overloaded
from ostinato.runtime.http.api_errors import BodyEncoded, BodyTimeout, BodyTooLarge
from ostinato.runtime.http.server_state import STATE


async def read_body(request: web.Request) -> bytes:
    """The whole body, which must not be compressed: a few bytes could become gigabytes.

    Raises BodyTooLarge before more than the limit is kept, declared length or not; BodyTimeout when it does
    not arrive in time; BodyEncoded; InvalidRequest for broken chunks; Overloaded when too many others are on
    their way.
    """
    if (encoding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
        shown = "".join(char if char.isprintable() else "?" for char in encoding[:40])
        raise BodyEncoded(f"Content-Encoding {shown!r} is not read here; send the body as it is")
    state = request.app[STATE]
    limit, config = request.client_max_size, state.config
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while piece := await request.content.readany():
                size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                try:
                    state.bodies.take(len(piece))
                except Overloaded:
                    size -= len(piece)
                    raise
                pieces.append(piece)
        return b"".join(pieces)
    except TimeoutError:
        raise BodyTimeout(
            f"the request body did not arrive within {config.body_timeout_s:g} s (server.body_timeout_s)"
        ) from None
    except web.RequestPayloadError:
        raise InvalidRequest("the request body has broken chunks") from None
    finally:
        state.bodies.give_back(sum(map(len, pieces)))


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is over {limit} bytes (server.max_body_mib); send less text at once"
    )
