"""The same formats for a text that is all there: `parse_thinking`, `parse_tool_calls`."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from ostinato.runtime.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ostinato.runtime.output.formats import OutputFormat, ReasoningFormat
from ostinato.runtime.output.output_parser import OutputParser
from ostinato.runtime.output.reasoning_formats import MarkedThoughts
from ostinato.runtime.output.registry import reasoning_format, tool_format


class ParsedThinking(NamedTuple):
    """Thoughts and the rest."""

    reasoning: str
    content: str


class ParsedToolCall(NamedTuple):
    """One call. `whole` is false if the text broke off in it; `arguments` is then what could be saved."""

    name: str
    arguments: dict[str, Any]  # Any: JSON of the model's own
    whole: bool = True


class ParsedToolCalls(NamedTuple):
    """Text around the calls, and the calls."""

    content: str
    calls: list[ParsedToolCall]


def parse_thinking(
    text: str, format: str = "qwen3", *, begun: bool | None = None, strict: bool = False
) -> ParsedThinking:
    """Split a model's answer into thoughts and content, as the server does.

    `begun`: the prompt ended inside thoughts, so the answer has no start marker; None: yes if the text has
    an end marker and no start.  Lenient, thoughts without an end go on to the end of the text.  With `strict`
    that is a ValueError, as is an end marker without a start unless `begun` says so.  ConfigError for an
    unknown format, with the known ones.
    """
    parser_of = reasoning_format(format)
    starts, ends = _markers(parser_of)
    has_start = any(one in text for one in starts)
    has_end = any(one in text for one in ends)
    if strict and ends:
        if (has_start or begun) and not has_end:
            raise ValueError(f"the thoughts have no end: {' or '.join(ends)} is missing")
        if has_end and not has_start and not begun:
            missing = " or ".join(starts)
            raise ValueError(f"thoughts end that never began: {missing} is missing; or set begun=True")
    if begun is None:
        begun = has_end and not has_start
    events = _events(OutputParser(parser_of, None, prompt_end=starts[0] if begun and ends else _CLOSED), text)
    return ParsedThinking(
        "".join(one.text for one in events if isinstance(one, Reasoning)),
        "".join(one.text for one in events if isinstance(one, Content)),
    )


def parse_tool_calls(
    text: str, format: str = "hermes", *, tools: Collection[str] | None = None, strict: bool = False
) -> ParsedToolCalls:
    """Find the tool calls in a model's answer, as the server does.

    `tools`: names that may be called, or a mapping of them to the JSON schemas of their arguments; formats
    without markers need the names to tell a call from an answer in JSON, those without types the schemas.

    Lenient, a call that breaks off is saved as far as it goes (`whole` is false), and arguments that are no
    JSON object are empty.  With `strict` both are a ValueError, as are a tool that is not among `tools` and a
    marker behind which no call stands.  ConfigError for an unknown format.
    """
    parser_of = tool_format(format)
    events = _events(OutputParser(None, parser_of, tools=tools), text)
    content = "".join(one.text for one in events if isinstance(one, Content))
    calls: list[ParsedToolCall] = []
    name, pieces = "", list[str]()
    for event in events:
        match event:
            case CallStart():
                name, pieces = event.name, []
            case CallArguments():
                pieces.append(event.text)
            case CallEnd():
                calls.append(_call(name, "".join(pieces), event.whole, tools, strict=strict))
            case _:
                pass
    if strict and (found := next((one for one in parser_of.starts if one in content), None)):
        raise ValueError(f"{found!r} stands in the text, and no call behind it")
    return ParsedToolCalls(content, calls)


_CLOSED = "</think>"  # a prompt that ends so has no open thoughts, in any format


def _markers(parser_of: ReasoningFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    made: OutputFormat = parser_of
    return made.starts, made.ends if isinstance(made, MarkedThoughts) else ()


def _events(parser: OutputParser, text: str) -> list[Event]:
    return [*parser.push(text), *parser.finish()]


def _call(
    name: str, text: str, whole: bool, tools: Collection[str] | None, *, strict: bool
) -> ParsedToolCall:
    arguments = _read(text)
    if strict and (not whole or not isinstance(arguments, dict)):
        raise ValueError(f"call of {name!r}: its arguments are no complete JSON object: {text[:200]!r}")
    if strict and tools is not None and name not in tools:
        raise ValueError(f"call of {name!r}: no such tool; there are {', '.join(sorted(tools))}")
    if arguments is None and not whole:
        arguments = _saved(text)
    return ParsedToolCall(name, arguments if isinstance(arguments, dict) else {}, whole)


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _saved(text: str) -> object:
    """JSON text that breaks off, closed behind its last complete part or inside its last string."""
    closers: list[str] = []
    in_string = escape = False
    cuts: list[tuple[int, str]] = []  # places where the text can be closed, and with what
    for at, char in enumerate(text):
        if in_string:
            if escape:
                escape = False
            elif char == "\\":
                escape = True
            elif char == '"':
                in_string = False
            continue
        if char == '"':
            in_string = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            cuts.append((at + 1, "".join(reversed(closers))))
        elif char in "}]":
            if closers:
                closers.pop()
        elif char == ",":
            cuts.append((at, "".join(reversed(closers))))
    tail = "".join(reversed(closers))
    for end, rest in ((len(text), tail), (len(text), '"' + tail), *reversed(cuts[-4:])):
        if (value := _read(text[:end] + rest)) is not None:
            return value
    return None
