"""Asks a server what a batch file asks: many requests at once, tried again where that may help.

What goes wrong is told in the log when it does for the first time, and for each request in its own answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TextIO

import aiohttp

from ostinato.runtime.batch_lines import PASSING, BadLine, BatchLine, read_lines, write_answer, write_error

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0
TELL_EVERY_S = 10.0
CONNECT_S = 30.0
_LONG = 200  # bytes or characters of an answer that a message shows
_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


class BatchRun:
    """One run over the input; answers are written as they come."""

    def __init__(
        self,
        source: Path,
        out: TextIO,
        done: set[str],
        *,
        model: str | None = None,
        retries: int,
        concurrency: int,
    ) -> None:
        """`done`: requests that have their answer. `model` takes the place of each request's own."""
        self.answered = 0
        self.failed = 0
        self._source = source
        self._out = out
        self._done = done
        self._model = model
        self._retries = retries
        self._concurrency = concurrency
        self._reported = time.monotonic()
        self._told: set[Hashable] = set()  # what has gone wrong before

    async def run(self, url: str, key: str) -> None:
        """Ask everything that has no answer yet."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        room = asyncio.Semaphore(self._concurrency)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for line in read_lines(self._source):
                if line.custom_id in self._done:
                    continue
                if isinstance(line, BadLine):
                    self._error(line.custom_id, "invalid_line", line.problem)
                    continue
                await room.acquire()
                tasks.create_task(self._ask(http, url, line)).add_done_callback(lambda _: room.release())

    async def _ask(self, http: aiohttp.ClientSession, url: str, line: BatchLine) -> None:
        body = line.body if self._model is None else {**line.body, "model": self._model}
        raw = json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            wait_s = min(LONGEST_WAIT_S, 2.0**attempt)
            try:
                async with http.post(url + line.url, data=raw, headers=_JSON) as response:
                    raw_answer = await response.read()
                    if response.status in PASSING and attempt < self._retries:
                        wait_s = _retry_after_s(response.headers, wait_s)
                        self._tell_passing(url, response.status, raw_answer)
                    else:
                        self._answer(line.custom_id, response, raw_answer)
                        return
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                self._tell_connection(url, error)
                if attempt == self._retries:
                    said = f"{url}: {error or type(error).__name__}"
                    self._error(line.custom_id, "connection_error", said)
                    return
            await asyncio.sleep(wait_s)

    def _answer(self, custom_id: str, response: aiohttp.ClientResponse, raw: bytes) -> None:
        request_id = response.headers.get("X-Request-Id", "")
        if response.status in (401, 403):
            self._tell_key(response, raw)
        elif response.status != 200:
            self._tell_failed(custom_id, response.status, f"status {response.status}: {_said(raw)}")
        try:
            body = json.loads(raw, parse_constant=_not_json)
            write_answer(self._out, custom_id, response.status, request_id, body)
        except (ValueError, RecursionError):
            shown = raw[:_LONG].decode("utf-8", "replace")
            self._error(custom_id, "invalid_answer", f"status {response.status}, and no JSON: {shown}")
            return
        self._count(is_good=response.status == 200)

    def _error(self, custom_id: str | None, code: str, message: str) -> None:
        if code != "connection_error":  # that is told when it is met
            self._tell_failed(custom_id, code, message)
        write_error(self._out, custom_id, code, message)
        self._count(is_good=False)

    def _count(self, *, is_good: bool) -> None:
        self.answered += is_good
        self.failed += not is_good
        if time.monotonic() - self._reported > TELL_EVERY_S:
            self._reported = time.monotonic()
            log.info("%d answered, %d failed so far", self.answered, self.failed)

    def _is_new(self, trouble: Hashable) -> bool:
        is_new = trouble not in self._told
        self._told.add(trouble)
        return is_new

    def _tell_connection(self, url: str, error: Exception) -> None:
        if not self._is_new("connection"):
            return
        wait_s = sum(min(LONGEST_WAIT_S, 2.0**attempt) for attempt in range(self._retries))
        again = f"each request is tried again for {wait_s:.0f} s" if wait_s else "requests fail"
        log.warning(
            "no connection to %s: %s; %s. Start the server, or give its address", url, _reason(error), again
        )

    def _tell_passing(self, url: str, status: int, raw: bytes) -> None:
        if self._is_new(status):
            log.warning(
                "%s answers with status %d: %s; what fails so is tried again", url, status, _said(raw)
            )

    def _tell_key(self, response: aiohttp.ClientResponse, raw: bytes) -> None:
        if not self._is_new("key"):
            return
        has_key = "Authorization" in response.request_info.headers
        log.error(
            "%s refuses requests %s (status %d: %s); set OPENAI_API_KEY to %s, and run this again",
            response.url.origin(),
            "with the key of OPENAI_API_KEY" if has_key else "without a key",
            response.status,
            _said(raw),
            "a key that it takes" if has_key else "one of its keys",
        )

    def _tell_failed(self, custom_id: str | None, kind: Hashable, why: str) -> None:
        if self._is_new(kind):
            name = "a request" if custom_id is None else f"request {custom_id[:_LONG]!r}"
            log.warning("%s has failed: %s; the output file has all that fail", name, why)


def _reason(error: Exception) -> str:
    """Why there is no connection, without the address."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number, words = error.os_error.errno or 0, error.os_error.strerror
        if number > 0 or words:
            return os.strerror(number) if number > 0 else str(words)  # asyncio's own words have the address
    return str(error) or type(error).__name__


def _said(raw: bytes) -> str:
    """The message of an answer that is an error, in OpenAI's form or in any."""
    try:
        told = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        told = None
    text = told if isinstance(told, str) else raw[:_LONG].decode("utf-8", "replace")
    return " ".join(text.split())[:_LONG] or "no reason given"


def _retry_after_s(headers: Mapping[str, str], default_s: float) -> float:
    given = headers.get("Retry-After", "")
    return min(LONGEST_WAIT_S, float(given)) if given.isascii() and given.isdigit() else default_s


def _not_json(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
