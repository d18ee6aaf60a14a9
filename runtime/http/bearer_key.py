"""The key that a request carries."""

from __future__ import annotations

import hmac

from aiohttp import web


def key_of(request: web.Request) -> str | None:
    """From `Authorization: Bearer KEY`, in any case of `Bearer`, or `X-Api-Key: KEY` as Anthropic's clients
    send it."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    return request.headers.get("X-Api-Key")


def has_key(request: web.Request, key: str) -> bool:
    """Whether it carries this very key. Takes as long for any wrong key."""
    given = key_of(request) or ""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), key.encode())
