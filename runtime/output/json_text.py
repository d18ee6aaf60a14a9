"""JSON inside a model's text: one value, passed on without the white space around its parts."""

from __future__ import annotations

import json

from ostinato.runtime.output.text_reader import SPACE, Sink, Steps, TextReader

_IN_STRING = '"\\' + "".join(map(chr, range(32)))


def escaped(text: str) -> str:
    """The inside of a JSON string for `text`; pieces of a text can be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_string(read: TextReader, sink: Sink) -> Steps[bool]:
    """Pass on one string with its quotes; False if the text ends in it.

    A control character in it, which JSON does not allow and models write, is escaped.
    """
    sink((yield from read.take()))
    while True:
        stop = yield from read.until_char(_IN_STRING, sink)
        if not stop:
            return False
        char = yield from read.take()
        if stop == '"':
            sink(char)
            return True
        if stop == "\\":
            after = yield from read.take()
            if not after:
                sink(char)
                return False
            sink(char + after if after >= " " else char + char + escaped(after))
        else:
            sink(escaped(char))


def json_value(read: TextReader, sink: Sink) -> Steps[bool]:
    """Pass on one value; False if the text ends in it or none begins here.

    Strings and brackets are understood, what stands between them is passed on as it is.
    """
    yield from read.take_while(SPACE)
    char = yield from read.peek()
    if char == '"':
        return (yield from json_string(read, sink))
    if char not in ("{", "["):
        before: list[str] = []
        ends = yield from read.until_char(",]}" + SPACE, before.append)
        sink("".join(before))
        return bool(before) and (bool(ends) or read.ended)
    depth = 0
    while char := (yield from read.peek()):
        if char == '"':
            if not (yield from json_string(read, sink)):
                return False
            continue
        if char in SPACE:
            yield from read.take_while(SPACE)
            continue
        if char in "{}[]":
            yield from read.take()
            sink(char)
            depth += 1 if char in "{[" else -1
            if depth == 0:
                return True
            continue
        yield from read.until_char('"{}[]' + SPACE, sink)
    return False


def compact(text: str) -> str:
    """JSON text without white space between its parts; what is no JSON comes out much as it went in."""
    read, out = TextReader(), list[str]()
    read.feed(text.strip())
    read.end()
    for _ in json_value(read, out.append):
        pass
    return "".join(out)


def is_json(text: str) -> bool:
    """Whether this is one JSON value, in the strict sense."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> object:
    raise ValueError(name)


def as_string(literal: str) -> str | None:
    """What a JSON string literal stands for; None if it is none."""
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
