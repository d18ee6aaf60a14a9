"""An answer as a message of Anthropic's API, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ostinato.runtime.http.answer_blocks import AnswerBlocks, Block, BlockEvent
from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.named_events import frame
from ostinato.runtime.http.strict_json import is_deep
from ostinato.runtime.output.events import Event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer:
    """Renders one answer. Of a stream the parts are `begin`, `push` of all events, `finish`."""

    def __init__(self, message_id: str, model: str, choice: Choice, *, streams: bool) -> None:
        self.id = message_id
        self.reasoning_tokens = 0  # so far
        self._model = model
        self._choice = choice
        self._streams = streams
        self._blocks = AnswerBlocks()
        self._reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self) -> bytes:
        """`message_start` and one `ping`."""
        message = {**self.body(), "content": []}
        start = _event("message_start", message=message)
        return start + _event("ping")

    def push(self, events: Iterable[Event]) -> bytes:
        """What came, as events of the stream."""
        return self._told(self._blocks.push(events))

    def finish(self, reason: str, stop_sequence: str | None) -> bytes:
        """The end of the last block and of the message."""
        self._stop_sequence = stop_sequence
        calls = bool(self._blocks.blocks) and self._blocks.blocks[-1].kind == "call"
        self._reason = "stop_sequence" if stop_sequence is not None else _STOP_REASONS[reason]
        if self._reason == "end_turn" and calls:
            self._reason = "tool_use"
        out = self._told(self._blocks.close())
        if not self._streams:
            return b""
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop_sequence}
        return out + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def body(self) -> dict[str, object]:
        """The message as far as it is."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_content(block) for block in self._blocks.blocks],
            "stop_reason": self._reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, object]:
        """Anthropic counts tokens of the prompt that came from the cache apart."""
        cached = self._choice.cached_tokens
        return {
            "input_tokens": len(self._choice.request.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.output.num_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }

    def _told(self, events: Iterable[BlockEvent]) -> bytes:
        return b"".join([self._tell(event) for event in events]) if self._streams else _drain(events)

    def _tell(self, event: BlockEvent) -> bytes:
        index = event.block.index
        match event.what:
            case "start":
                return _event("content_block_start", index=index, content_block=_empty(event.block))
            case "delta":
                return _event("content_block_delta", index=index, delta=_delta(event.block, event.text))
            case "stop":
                return _signature(event.block) + _event("content_block_stop", index=index)


def _drain(events: Iterable[BlockEvent]) -> bytes:
    for _ in events:
        pass
    return b""


def _event(kind: str, **fields: object) -> bytes:
    return frame(kind, dump({"type": kind, **fields}))


def _signature(block: Block) -> bytes:
    """Thoughts end with a signature, though an empty one: clients that see none leave them out later."""
    if block.kind != "reasoning":
        return b""
    delta = {"type": "signature_delta", "signature": ""}
    return _event("content_block_delta", index=block.index, delta=delta)


def _empty(block: Block) -> dict[str, object]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: Block, text: str) -> dict[str, object]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _content(block: Block) -> dict[str, object]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            arguments = _arguments(block.text)
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _arguments(text: str) -> dict[str, Any]:  # Any: the tool's own business
    """Arguments as an object; those of a call that was cut short may be no JSON, and are `{}`.

    So are those that a model made up and that no answer can hold: NaN, 1e999, a hundred lists in each other.
    """
    try:
        value = json.loads(text or "{}")
        dump(value)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and not is_deep(value) else {}
