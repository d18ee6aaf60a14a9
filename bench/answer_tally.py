"""From the events of one streamed answer, each with its time, to a `RequestRecord`.

Which event counts is the whole point of a load tester, so it is decided here and nowhere else: a chunk counts
as generated when any channel of a choice (text, content, reasoning, refusal, tool call) has something in it.
The role chunk, keep-alive comments, the usage chunk and the chunk that only says why it ended are not tokens.
"""

from __future__ import annotations

import json
from typing import Any

from ostinato.bench.request_record import RequestRecord

DONE = b"[DONE]"
WRONG_SHAPE = (AttributeError, LookupError, TypeError)  # what reading JSON of another shape raises
_MOST = 2**53  # tokens; a larger number is no count
_CHANNELS = ("content", "reasoning", "reasoning_content", "refusal")


class AnswerTally:
    """Fills `record`; `push` every event as it comes, `close` at the end of the body."""

    def __init__(self, record: RequestRecord, *, keeps_text: bool = False) -> None:
        self.record = record
        self.text: list[str] = []  # of the answer proper; the next turn of a conversation needs it
        self._keeps_text = keeps_text
        self._ids = 0
        self._finished = False
        self._done = False

    def push(self, at: float, data: bytes) -> None:
        """One event's data, `at` seconds after the request was sent."""
        if data == DONE:
            self._done = True
            return
        record = self.record
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            record.error = record.error or f"an event is not a JSON object: {data[:80]!r}"
            return
        try:
            self._read(at, chunk)
        except WRONG_SHAPE:
            record.error = record.error or f"an event has another shape than OpenAI's: {data[:80]!r}"

    def _read(self, at: float, chunk: dict[str, Any]) -> None:
        record = self.record
        if chunk.get("error"):
            record.error = record.error or _error_text(chunk["error"])
            return
        if usage := chunk.get("usage"):
            read_usage(record, usage)
        generated = False
        for choice in chunk.get("choices") or ():
            channels, content = _read_choice(choice)
            ids = len(choice.get("token_ids") or ())
            self._ids += ids
            generated = generated or channels or ids > 0
            if content:
                if record.first_content_at is None:
                    record.first_content_at = at
                if self._keeps_text:
                    self.text.append(content)
            if choice.get("finish_reason") is not None:
                self._finished = True
                record.end_at = at
        if generated:
            if record.first_token_at is None:
                record.first_token_at = at
            record.token_times_at.append(at)
            record.end_at = at

    def close(self, at: float) -> None:
        """The body has ended. Without a finish_reason and without `[DONE]` the answer was cut off."""
        record = self.record
        if not record.error and not (self._finished or self._done):
            record.error = "the stream ended without a finish_reason"
        if record.output_tokens is None:
            record.output_tokens = self._ids or len(record.token_times_at)
            record.output_tokens_from = "token_ids" if self._ids else "chunks"
        record.ok = not record.error
        if not record.end_at or record.error:
            record.end_at = at


def read_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    """OpenAI's usage object; the last one that comes holds."""
    if (tokens := _count(usage.get("completion_tokens"))) is not None:
        record.output_tokens, record.output_tokens_from = tokens, "usage"
    if (tokens := _count(usage.get("prompt_tokens", usage.get("total_tokens")))) is not None:
        record.prompt_tokens = tokens
    details = usage.get("prompt_tokens_details") or {}
    if (tokens := _count(details.get("cached_tokens"))) is not None:
        record.cached_tokens = tokens


def _count(value: object) -> int | None:
    """A number of tokens. TypeError for what can be none; None when it is left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise TypeError(f"{value!r:.40} is no number of tokens")
    return value


def _read_choice(choice: dict[str, Any]) -> tuple[bool, str]:
    """Whether a channel has something in it, and the text of the answer proper."""
    delta = choice.get("delta")
    if delta is None:
        text = _text(choice.get("text"))
        return bool(text), text
    if any(delta.get(channel) for channel in _CHANNELS):
        return True, _text(delta.get("content"))
    calls = delta.get("tool_calls") or ([{"function": call}] if (call := delta.get("function_call")) else [])
    functions = [call.get("function") or call.get("custom") or {} for call in calls]
    return any(one.get("name") or one.get("arguments") or one.get("input") for one in functions), ""


def _text(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value or ""


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return f"error event: {message}"[:300]
