"""For every list of events: what a stream tells adds up to what the whole answer says, in both APIs."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.http.messages_render import MessageAnswer
from ostinato.runtime.http.responses_render import ResponseAnswer
from ostinato.runtime.http.responses_schema import ResponsesRequest
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from tests.support.toy_text import tokenizer

CODEC = TokenCodec(tokenizer())
TEXTS = st.text('aé😀\n"{} \\', min_size=1, max_size=5)


@dataclass
class Output:
    num_tokens: int = 7


@dataclass
class Choice:
    """As much of a choice as a rendering looks at."""

    request: GenerateRequest = field(
        default_factory=lambda: GenerateRequest(
            request_id="x", prompt_token_ids=(1, 2, 3), sampling=SamplingParams()
        )
    )
    output: Output = field(default_factory=Output)
    cached_tokens: int = 2


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[list[Event]], str]:
    """Events in batches, cut anywhere, and how the answer ends."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=6)):
        if kind == "text":
            events += [Content(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=3))]
        elif kind == "thought":
            events += [Reasoning(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=3))]
        else:
            raw = json.dumps(draw(st.dictionaries(TEXTS, TEXTS, max_size=2)))
            at = draw(st.integers(0, len(raw)))
            events.append(CallStart(calls, f"call_{calls}", draw(TEXTS)))
            events += [CallArguments(calls, part) for part in (raw[:at], raw[at:])]
            events.append(CallEnd(calls))
            calls += 1
    reason = draw(st.sampled_from(["stop", "length"]))
    if reason == "length" and events:
        events = events[: draw(st.integers(0, len(events)))]
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)))
    edges = [0, *cuts, len(events)]
    return [events[a:b] for a, b in pairwise(edges)], reason


def told(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n")
        found.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message(batches: list[list[Event]], reason: str, *, streams: bool) -> tuple[bytes, dict[str, Any]]:
    answer = MessageAnswer("msg_1", "toy", Choice(), streams=streams)
    raw = answer.begin() + b"".join(answer.push(batch) for batch in batches)
    raw += answer.finish(reason, None)
    return raw, answer.body()


@given(answers())
def test_a_streamed_message_is_the_whole_one(made):
    batches, reason = made
    raw, _ = message(batches, reason, streams=True)
    _, whole = message(batches, reason, streams=False)
    blocks: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    is_open = False
    for event in told(raw):
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                is_open, kind = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                kind = delta.pop("type")
                key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}.get(
                    kind, "signature"
                )
                (piece,) = delta.values()
                blocks[-1][key] += piece
            case "content_block_stop":
                is_open = False
                assert (kind == "signature_delta") == (blocks[-1]["type"] == "thinking")
            case "message_delta":
                end = event
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:
                assert reason == "length"
    assert blocks == whole["content"]
    assert (end["delta"]["stop_reason"], end["usage"]) == (whole["stop_reason"], whole["usage"])
    if reason == "stop":
        assert whole["stop_reason"] == (
            "tool_use" if blocks and blocks[-1]["type"] == "tool_use" else "end_turn"
        )


def response(batches: list[list[Event]], reason: str, *, streams: bool) -> tuple[bytes, dict[str, Any]]:
    fields = ResponsesRequest.model_validate({"input": "x"})
    answer = ResponseAnswer("resp_x", "toy", CODEC, fields, Choice(), streams=streams)
    frames = answer.begin() + [one for batch in batches for one in answer.push(batch, ())]
    frames += answer.finish(reason)
    return b"".join(frames), answer.body()


def named(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "id": ""} for item in items]


@given(answers())
def test_a_streamed_response_is_the_whole_one(made):
    batches, reason = made
    raw, _ = response(batches, reason, streams=True)
    _, whole = response(batches, reason, streams=False)
    events = told(raw)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if "output_index" in event:
            assert event["output_index"] == len(items) - (kind != "response.output_item.added")
        if kind == "response.output_item.added":
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind.endswith("text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
        elif kind.endswith("text.done"):
            assert items[-1]["content"][0]["text"] == event["text"]
        elif kind == "response.output_item.done":
            assert items[-1] | {"status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
    assert named(items) == named(whole["output"])
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert named(last["output"]) == named(whole["output"])
    assert (last["status"], last["usage"]) == (whole["status"], whole["usage"])
