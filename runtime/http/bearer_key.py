"""Whether a request carries a key."""

from __future__ import annotations

import hmac

from aiohttp import web


def has_key(request: web.Request, key: str) -> bool:
    """True for `Authorization: Bearer KEY`, in any case of `Bearer`. Takes as long for any wrong key."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    matches = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
    return scheme.lower() == "bearer" and matches
