"""Gemma 4's tool calls: `<|tool_call>call:name{key:<|"|>text<|"|>,n:1}<tool_call|>`."""

from __future__ import annotations

import json

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.call_object import is_name
from ostinato.runtime.output.formats import ToolFormat
from ostinato.runtime.output.json_text import escaped, is_json, json_string
from ostinato.runtime.output.text_reader import SPACE, Sink, Steps, TextReader

QUOTE = '<|"|>'


class Gemma4(ToolFormat):
    """Keys stand bare or between quote markers, strings between quote markers; the rest is as in JSON."""

    name = "gemma4"
    starts = ("<|tool_call>",)
    inner = ("<tool_call|>", QUOTE)
    is_special = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|tool_call>" in template

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return ("<tool_call|>",)

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        yield from read.take_while(SPACE)
        if not (yield from read.accept("call:")):
            return False
        while True:
            header: list[str] = []
            yield from read.until_char("{<\n", header.append)
            name = "".join(header).strip()
            if (yield from read.peek()) != "{" or not is_name(name):
                return bool(answer.num_calls)
            answer.start_call(name)
            whole = yield from _value(read, answer.arguments)
            answer.end_call(whole=whole)
            yield from read.take_while(SPACE)
            if not (yield from read.accept("call:")):
                break
        yield from read.accept_end("<tool_call|>")
        return True


def _value(read: TextReader, sink: Sink) -> Steps[bool]:
    """One value as JSON text; False if the text ends in it."""
    yield from read.take_while(SPACE)
    char = yield from read.peek()
    if char == "{":
        return (yield from _object(read, sink))
    if char == "[":
        return (yield from _list(read, sink))
    if char == '"':
        return (yield from json_string(read, sink))
    if (yield from read.accept_end(QUOTE)):
        sink('"')
        if not (yield from read.until((QUOTE,), lambda text: sink(escaped(text)), drops_begun=True)):
            return False
        sink('"')
        return True
    literal: list[str] = []
    ends = yield from read.until_char(",]}<", literal.append)
    text = "".join(literal).strip()
    if ends == "<" and not text:
        return False
    sink(text if is_json(text) or not ends else json.dumps(text, ensure_ascii=False))
    return bool(ends)


def _object(read: TextReader, sink: Sink) -> Steps[bool]:
    yield from read.take()
    sink("{")
    first = True
    while True:
        yield from read.take_while(SPACE + ",")
        char = yield from read.peek()
        if char == "}":
            yield from read.take()
            sink("}")
            return True
        if not char:
            return False
        if not first:
            sink(",")
        first = False
        if not (yield from _key(read, sink)):
            return False
        sink(":")
        if not (yield from _value(read, sink)):
            return False


def _key(read: TextReader, sink: Sink) -> Steps[bool]:
    key: list[str] = []
    if (yield from read.accept_end(QUOTE)):
        if not (yield from read.until((QUOTE,), key.append)):
            return False
        name = "".join(key)
    elif (yield from read.peek()) == '"':
        if not (yield from json_string(read, key.append)):
            return False
        name = "".join(key)[1:-1]
        sink(f'"{name}"')
        yield from read.take_while(SPACE)
        return bool((yield from read.accept(":")))
    else:
        yield from read.until_char(":{}", key.append)
        name = "".join(key).strip()
    yield from read.take_while(SPACE)
    if not (yield from read.accept(":")):
        return False
    sink(json.dumps(name, ensure_ascii=False))
    return True


def _list(read: TextReader, sink: Sink) -> Steps[bool]:
    yield from read.take()
    sink("[")
    first = True
    while True:
        yield from read.take_while(SPACE + ",")
        char = yield from read.peek()
        if char == "]":
            yield from read.take()
            sink("]")
            return True
        if not char:
            return False
        if not first:
            sink(",")
        first = False
        if not (yield from _value(read, sink)):
            return False
