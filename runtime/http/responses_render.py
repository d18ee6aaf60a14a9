"""An answer as an object of the Responses API, streamed and whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from ostinato.runtime.choice_output import ShownToken
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.http.answer_blocks import AnswerBlocks, Block, BlockEvent
from ostinato.runtime.http.answer_parts import alternatives, dump, finite, new_id
from ostinato.runtime.http.api_errors import error_body
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.named_events import frame
from ostinato.runtime.http.responses_schema import ResponsesRequest
from ostinato.runtime.output.events import Event

_ID_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
# where the text of a block is, and its events: the place's name, of a part, of the part's text
_OUTPUT = "content_index", "response.content_part", "response.output_text"
_THOUGHTS = "content_index", "response.content_part", "response.reasoning_text"
_SUMMARY = "summary_index", "response.reasoning_summary_part", "response.reasoning_summary_text"


class ResponseAnswer:
    """Renders one answer. Of a stream the parts are `begin`, `push` of all events, and one of the ends.

    Each of them returns frames, of which number i of all has `sequence_number` i; none unless `streams`.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        codec: TokenCodec,
        fields: ResponsesRequest,
        choice: Choice,
        *,
        streams: bool,
    ) -> None:
        self.id = response_id
        self.status = "in_progress"
        self.reasoning_tokens = 0  # so far
        self._codec = codec
        self._fields = fields
        self._choice = choice
        self._streams = streams
        asked = fields.reasoning
        self._summarises = asked is not None and bool(asked.summary or asked.generate_summary)
        self._sequence = 0
        self._blocks = AnswerBlocks()
        self._ids: list[str] = []  # of items, by block
        self._error: dict[str, object] | None = None
        self._incomplete: dict[str, object] | None = None
        self._completed_at: int | None = None
        self._fixed = _echo(fields, choice, model)

    def begin(self) -> list[bytes]:
        """`response.created`, `response.in_progress`."""
        return self._states("response.created") + self._states("response.in_progress")

    def push(self, events: Iterable[Event], tokens: tuple[ShownToken, ...]) -> list[bytes]:
        """What came, as events of the stream."""
        return self._told(self._blocks.push(events, tokens))

    def finish(self, reason: str) -> list[bytes]:
        """The model has ended, or `reason` is length."""
        out = self._told(self._blocks.close(whole=reason != "length"))
        if reason == "length":
            self._incomplete = {"reason": "max_output_tokens"}
            return out + self._end("incomplete", "response.incomplete")
        self._completed_at = int(time.time())
        return out + self._end("completed", "response.completed")

    def fail(self, error: Exception) -> list[bytes]:
        """The engine has given up on it."""
        told = json.loads(error_body(error))["error"]
        self._error = {"code": "server_error", "message": told["message"]}
        return self._told(self._blocks.close(whole=False)) + self._end("failed", "response.failed")

    def cancel(self) -> list[bytes]:
        """The client has cancelled it. No event says so; `incomplete` comes nearest."""
        return self._told(self._blocks.close(whole=False)) + self._end("cancelled", "response.incomplete")

    def body(self) -> dict[str, object]:
        """The response as far as it is."""
        done = self.status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": self.output(),
            "usage": self._usage() if done else None,
            **self._fixed,
        }

    def output(self) -> list[dict[str, object]]:
        """The items as far as they are."""
        ended = self.status != "in_progress"
        items = []
        for block, item_id in zip(self._blocks.blocks, self._ids, strict=True):
            is_open = not ended and block is self._blocks.blocks[-1]
            items.append(self._item(block, item_id, _status(block, is_open=is_open)))
        return items

    def _end(self, status: str, event: str) -> list[bytes]:
        self.status = status
        return self._states(event)

    def _states(self, event: str) -> list[bytes]:
        return self._event(event, response=self.body()) if self._streams else []

    def _event(self, kind: str, **fields: object) -> list[bytes]:
        if not self._streams:
            return []
        payload = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return [frame(kind, dump(payload))]

    def _told(self, events: Iterable[BlockEvent]) -> list[bytes]:
        out: list[bytes] = []
        for event in events:
            if event.what == "start":
                self._ids.append(new_id(_ID_PREFIX[event.block.kind]).replace("-", "_"))
            if self._streams:
                out += self._tell(event)
        return out

    def _tell(self, event: BlockEvent) -> list[bytes]:
        block = event.block
        at: dict[str, object] = {"item_id": self._ids[block.index], "output_index": block.index}
        if block.kind == "call":
            return self._tell_call(event, at)
        thoughts = _SUMMARY if self._summarises else _THOUGHTS
        place, part, text = _OUTPUT if block.kind == "text" else thoughts
        at[place] = 0
        logprobs = {"logprobs": self._logprobs(event.tokens)} if block.kind == "text" else {}
        match event.what:
            case "start":
                return self._added(block) + self._event(
                    f"{part}.added", **at, part=self._part(block, empty=True)
                )
            case "delta":
                return self._event(f"{text}.delta", **at, delta=event.text, **logprobs)
            case "stop":
                if block.kind == "text":
                    logprobs = {"logprobs": self._logprobs(block.tokens)}
                return (
                    self._event(f"{text}.done", **at, text=block.text, **logprobs)
                    + self._event(f"{part}.done", **at, part=self._part(block))
                    + self._done(block)
                )

    def _tell_call(self, event: BlockEvent, at: dict[str, object]) -> list[bytes]:
        kind = "response.function_call_arguments"
        match event.what:
            case "start":
                return self._added(event.block)
            case "delta":
                return self._event(f"{kind}.delta", **at, delta=event.text)
            case "stop":
                block = event.block
                done = self._event(f"{kind}.done", **at, name=block.name, arguments=block.text)
                return done + self._done(block)

    def _added(self, block: Block) -> list[bytes]:
        item = self._item(block, self._ids[block.index], "in_progress", empty=True)
        return self._event("response.output_item.added", output_index=block.index, item=item)

    def _done(self, block: Block) -> list[bytes]:
        item = self._item(block, self._ids[block.index], _status(block, is_open=False))
        return self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, item_id: str, status: str, *, empty: bool = False) -> dict[str, object]:
        item: dict[str, object] = {"id": item_id, "status": status}
        content = [] if empty else [self._part(block)]
        match block.kind:
            case "text":
                return item | {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                summary, content = (content, []) if self._summarises else ([], content)
                return item | {"type": "reasoning", "summary": summary, "content": content}
            case "call":
                called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call", **called}

    def _part(self, block: Block, *, empty: bool = False) -> dict[str, object]:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "summary_text" if self._summarises else "reasoning_text", "text": text}
        listed = [] if empty else self._logprobs(block.tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": listed}

    def _logprobs(self, tokens: Iterable[ShownToken]) -> list[dict[str, Any]]:  # Any: JSON of two depths
        top = self._fields.top_logprobs or 0
        listed = []
        for token in tokens:
            chosen = finite(token.logprob.logprob) if token.logprob is not None else 0.0
            others = [self._named(i, value) for i, value in alternatives(token.logprob, top)]
            listed.append({**self._named(token.token_id, chosen), "top_logprobs": others})
        return listed

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:  # Any: as above
        raw = list(self._codec.token_bytes(token_id))
        return {"token": self._codec.token_text(token_id), "logprob": logprob, "bytes": raw}

    def _usage(self) -> dict[str, object]:
        prompt, generated = len(self._choice.request.prompt_token_ids), self._choice.output.num_tokens
        cached = {"cached_tokens": self._choice.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + generated,
        }


def response_id() -> str:
    """Not to be guessed: who knows it may ask for the response."""
    return new_id("resp").replace("-", "_")


def _status(block: Block, *, is_open: bool) -> str:
    if is_open:
        return "in_progress"
    return "completed" if block.whole else "incomplete"


def _echo(fields: ResponsesRequest, choice: Choice, model: str) -> dict[str, object]:
    """What of a response is known before it is made: the request, with the values in use."""

    def shown(name: str) -> Any:  # Any: JSON
        return fields.model_dump(mode="json", by_alias=True, exclude_none=True, include={name}).get(name)

    sampling = choice.request.sampling
    return {
        "created_at": int(time.time()),
        "model": model,
        "background": bool(fields.background),
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": None,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(shown("reasoning") or {})},
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **(shown("text") or {})},
        "tool_choice": shown("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in shown("tools") or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }
