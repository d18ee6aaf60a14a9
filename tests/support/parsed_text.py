"""Feed text to an output parser, cut in any way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from ostinato.runtime.output.answer import Enforced
from ostinato.runtime.output.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    join,
)
from ostinato.runtime.output.output_parser import OutputParser
from ostinato.runtime.output.registry import reasoning_format, tool_format


def parser(
    reasoning: str | None,
    calls: str | None,
    *,
    tools: Collection[str] | None = None,
    prompt_end: str = "",
    enforced: Enforced = Enforced.NOTHING,
) -> OutputParser:
    return OutputParser(
        reasoning_format(reasoning) if reasoning else None,
        tool_format(calls) if calls else None,
        tools=tools,
        prompt_end=prompt_end,
        enforced=enforced,
    )


def events(made: OutputParser, pieces: Sequence[str]) -> list[Event]:
    """All events, neighbours joined, ids of calls (which are drawn) left out."""
    out: list[Event] = []
    for piece in pieces:
        out += made.push(piece)
    out += made.finish()
    assert made.push("more") == made.finish() == [], "it is over"
    return [replace(one, id="") if isinstance(one, CallStart) else one for one in join(out)]


def cut(text: str, places: Collection[int]) -> list[str]:
    """`text` cut at these places, modulo its length."""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(at)]


def content(found: list[Event]) -> str:
    return "".join(one.text for one in found if isinstance(one, Content))


def thoughts(found: list[Event]) -> str:
    return "".join(one.text for one in found if isinstance(one, Reasoning))


def calls(found: list[Event]) -> list[tuple[str, str]]:
    """(name, arguments) in order; the order of events is checked on the way."""
    made: list[tuple[str, str]] = []
    is_open = False
    for one in found:
        if isinstance(one, CallStart):
            assert (one.index, is_open) == (len(made), False)
            made.append((one.name, ""))
            is_open = True
        elif isinstance(one, CallArguments):
            assert (one.index, is_open) == (len(made) - 1, True)
            made[-1] = (made[-1][0], made[-1][1] + one.text)
        elif isinstance(one, CallEnd):
            assert (one.index, is_open) == (len(made) - 1, True)
            is_open = False
    assert not is_open
    return made
