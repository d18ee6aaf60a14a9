"""Before the load: is the server there, which model does it serve, does it answer this kind of request?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import aiohttp

from ostinato.bench.answer_tally import WRONG_SHAPE
from ostinato.bench.load_item import LoadItem
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sender import Sender
from ostinato.bench.target import TargetSettings, base_of
from ostinato.errors import ConfigError

_AGAIN_S = 0.5


async def find_model(http: aiohttp.ClientSession, target: TargetSettings) -> str:
    """`target.model`, or the first that the server lists, within `ready_timeout_s`."""
    if target.model:
        return target.model
    url = base_of(target) + "/v1/models"
    end = time.monotonic() + target.ready_timeout_s
    while True:
        try:
            async with http.get(url) as response:
                if response.status == 200:
                    listed = (await response.json(content_type=None)).get("data") or []
                    if listed:
                        return str(listed[0]["id"])
                    raise ConfigError(f"{url} lists no model; give --model")
                said = f"status {response.status}"
                if response.status < 500:
                    raise ConfigError(f"{url}: {said}; give --model (and OPENAI_API_KEY if it wants a key)")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            said = str(error) or type(error).__name__
        except (*WRONG_SHAPE, ValueError, RecursionError):
            raise ConfigError(f"{url} lists models in another shape than OpenAI's; give --model") from None
        if time.monotonic() >= end:
            raise ConfigError(f"{url} does not answer: {said}; is the server running there? see --url")
        await asyncio.sleep(_AGAIN_S)


async def wait_ready(sender: Sender, item: LoadItem, seconds: float) -> None:
    """Return when a short request of the measured kind is answered. ConfigError says what came instead.

    A refused connection or a status of 5xx is asked again within `seconds`; any other answer is final.
    """
    if not seconds:
        return
    short = replace(item, turns=item.turns[:1], output_tokens=None if item.output_tokens is None else 1)
    end = time.monotonic() + seconds
    while True:
        record = RequestRecord(0)
        await sender.send(short, record)
        if record.ok:
            return
        may_come = not record.error.startswith("status ") or record.error.startswith("status 5")
        if not may_come or time.monotonic() >= end:
            raise ConfigError(f"the server does not answer a request of this kind: {record.error}")
        await asyncio.sleep(_AGAIN_S)


async def call_hook(http: aiohttp.ClientSession, target: TargetSettings, path: str) -> None:
    """POST to a profiler's path. ConfigError when the server refuses: a run without it would mislead."""
    if not path:
        return
    url = base_of(target) + path
    key = {"Authorization": f"Bearer {target.profile_key}"} if target.profile_key else {}
    try:
        async with http.post(url, json={}, headers=key) as response:
            if response.status >= 300:
                said = (await response.text(errors="replace"))[:300]
                raise ConfigError(f"POST {url}: status {response.status}: {said}")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ConfigError(f"POST {url}: {error or type(error).__name__}") from None
