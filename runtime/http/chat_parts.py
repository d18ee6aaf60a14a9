"""Content, reasoning and tool calls of an answer as OpenAI's chat API writes them, in deltas and whole."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.output.events import CallArguments, CallStart, Content, Event, Reasoning


def finish_reason(reason: str | None, num_calls: int) -> str | None:
    """`tool_calls` for an answer that ends by itself and has calls."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def content_json(text: str) -> str:
    """The `delta` object of content."""
    return f'{{"content":{dump(text)}}}'


def delta_json(part: Event, *, with_reasoning: bool) -> str | None:
    """The `delta` object of one event as JSON; None if it says nothing."""
    match part:
        case Content(text):
            return content_json(text)
        case Reasoning(text):
            said = dump(text)
            return f'{{"reasoning_content":{said},"reasoning":{said}}}' if with_reasoning else None
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return dump(
                {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            )
        case CallArguments(index, text):
            return dump({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        case _:
            return None


def message(text: str, parts: Iterable[Event], *, with_reasoning: bool) -> dict[str, object]:
    """The `message` object of a whole answer. `content` is null when there are calls and no text."""
    thoughts: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    for part in parts:
        match part:
            case Reasoning(thought):
                thoughts.append(thought)
            case CallStart():
                calls.append((part, []))
            case CallArguments(index, piece):
                calls[index][1].append(piece)
            case _:
                pass
    made: dict[str, object] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
    }
    if thoughts and with_reasoning:
        made["reasoning_content"] = made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = [
            {
                "id": start.id,
                "type": "function",
                "function": {"name": start.name, "arguments": "".join(pieces)},
            }
            for start, pieces in calls
        ]
    return made
