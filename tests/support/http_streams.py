"""Requests to a server process from an event loop: streams read to their end, or left in the middle."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

GREEDY: dict[str, object] = {"temperature": 0, "ignore_eos": True}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Events of a streamed answer, as they come; `[DONE]` stays a string."""
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text.startswith("data: "):
            yield text[6:] if text == "data: [DONE]" else json.loads(text[6:])
        else:
            assert text == "" or text.startswith(":"), text


async def stream(http: aiohttp.ClientSession, url: str, **fields: object) -> list[Any]:
    """All events of one streamed, greedy completion."""
    body = {**GREEDY, "stream": True, **fields}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return [event async for event in events(response)]


def text_of(answer: list[Any], *, index: int = 0) -> str:
    """Joined text of one choice of a streamed completion."""
    chunks = [event for event in answer if isinstance(event, dict)]
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)
