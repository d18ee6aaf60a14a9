"""Sends one request and records what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from ostinato.bench.answer_tally import WRONG_SHAPE, AnswerTally, read_usage
from ostinato.bench.load_item import LoadItem
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sse import EventReader
from ostinato.bench.target import BACKENDS, BodyMaker, TargetSettings, headers_of, streams, url_of

_SHOWN = 300  # characters of an error body that are kept


def open_session(target: TargetSettings) -> aiohttp.ClientSession:
    """A session without a limit of connections: how many there are is the load's decision."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        headers=headers_of(target),
        read_bufsize=1 << 18,
    )


class Sender:
    """One target over one session. `clock` gives seconds."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        target: TargetSettings,
        model: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._http = http
        self._url = url_of(target)
        self._streams = streams(target)
        self._entries = BACKENDS[target.backend].entries
        self._bodies = BodyMaker(target, model)
        self._clock = clock

    async def send(
        self,
        item: LoadItem,
        record: RequestRecord,
        *,
        turn: int = 0,
        answers: list[str] | None = None,
        keeps_text: bool = False,
    ) -> str:
        """Fill `record`; return the answer's text if `keeps_text`. Failures are in the record, not raised."""
        body = self._bodies.body(item, turn, answers)
        clock = self._clock
        began = clock()
        text = ""
        try:
            async with self._http.post(self._url, data=body) as response:
                if response.status != 200:
                    said = (await response.text(errors="replace")).strip()
                    record.error = f"status {response.status}: {said[:_SHOWN]}"
                elif self._streams:
                    tally = AnswerTally(record, keeps_text=keeps_text)
                    events = EventReader()
                    async for piece in response.content.iter_any():
                        at = clock() - began
                        for data in events.feed(piece):
                            tally.push(at, data)
                    tally.close(clock() - began)
                    text = "".join(tally.text)
                else:
                    answer = await response.json(content_type=None)
                    text = _read_whole(record, answer)
                    if self._entries and not record.error:
                        _count_inputs(record, answer.get(self._entries), item)
                    record.ok = not record.error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            record.ok = False
            record.error = f"{type(error).__name__}: {error}"[:_SHOWN] if str(error) else type(error).__name__
        except asyncio.CancelledError:
            record.ok, record.error = False, "cancelled"
            raise
        finally:
            if not record.ok or not record.end_at:
                record.end_at = clock() - began
        if keeps_text:
            record.text = text
        return text


def _count_inputs(record: RequestRecord, entries: Any, item: LoadItem) -> None:
    """An answer with another number of entries has failed, whatever its status.

    A ranking may be of the best documents only (`top_n`); all of them were compared.
    """
    given = len(item.documents or item.inputs or item.turns)
    found = len(entries) if isinstance(entries, list) else 0
    if not (1 if item.documents else given) <= found <= given:
        record.error = f"{found} results for {given} inputs"
        return
    record.inputs = given


def _read_whole(record: RequestRecord, answer: Any) -> str:
    """Usage and text of an answer in one piece; its channels are not told apart."""
    if not isinstance(answer, dict):
        record.error = f"the answer is {type(answer).__name__}, not a JSON object"
        return ""
    if answer.get("error"):
        record.error = f"error in the answer: {answer['error']}"[:_SHOWN]
    try:
        read_usage(record, answer.get("usage") or {})
        choices = answer.get("choices") or [{}]
        message = choices[0].get("message") or {}
        return str(choices[0].get("text") or message.get("content") or "")
    except WRONG_SHAPE:
        record.error = record.error or f"the answer has another shape than OpenAI's: {answer!r}"[:_SHOWN]
        return ""
