"""Tool calls as a list of Python calls: `[get_weather(city="Paris", days=3), now()]` (Llama 3.2 and 4).

Literals become JSON: strings of both quotes with Python's escapes, numbers, True, False, None, lists, dicts.
"""

from __future__ import annotations

import json
import re

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.call_object import is_name
from ostinato.runtime.output.formats import ToolFormat
from ostinato.runtime.output.json_text import escaped
from ostinato.runtime.output.text_reader import SPACE, Sink, Steps, TextReader

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


class Pythonic(ToolFormat):
    """In front of all content, or between `<|python_start|>` and `<|python_end|>`.

    The first name must be that of a tool: else the list is an answer.
    """

    name = "pythonic"
    starts = ("<|python_start|>", "<|python_tag|>")
    inner = ("<|python_end|>",)
    bare = "["

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|python_start|>" in template or "[func_name1(params_name1=" in template

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return self.inner if answer.num_calls else ()

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        yield from read.take_while(SPACE)
        if not (yield from read.accept("[")):
            return False
        first = True
        while True:
            yield from read.take_while(SPACE + ",")
            header: list[str] = []
            yield from read.until_char("(])[{\"'", header.append)
            name = "".join(header).strip()
            if (yield from read.peek()) != "(" or not is_name(name):
                break
            if first and not answer.knows(name):
                return False
            first = False
            yield from read.take()
            answer.start_call(name)
            whole = yield from _keywords(read, answer.arguments)
            answer.end_call(whole=whole)
            if not whole:
                return True
        if first:
            return False
        yield from read.accept("]")
        yield from read.take_while(SPACE, answer.content)
        yield from read.accept_end(*self.inner)
        return True


def _keywords(read: TextReader, sink: Sink) -> Steps[bool]:
    """What stands between the parentheses, as a JSON object; False if it breaks off."""
    sink("{")
    first = True
    while True:
        yield from read.take_while(SPACE + ",")
        if (yield from read.accept(")")):
            sink("}")
            return True
        key: list[str] = []
        if (yield from read.until_char("=,()", key.append)) != "=":
            return False
        yield from read.take()
        sink(("" if first else ",") + json.dumps("".join(key).strip(), ensure_ascii=False) + ":")
        first = False
        if not (yield from _literal(read, sink)):
            return False


def _literal(read: TextReader, sink: Sink) -> Steps[bool]:
    yield from read.take_while(SPACE)
    char = yield from read.peek()
    if char and char in "\"'":
        return (yield from _text(read, sink))
    if char == "[":
        return (yield from _items(read, sink, "[]"))
    if char == "{":
        return (yield from _items(read, sink, "{}"))
    word: list[str] = []
    ends = yield from read.until_char(",)]}:" + SPACE, word.append)
    text = "".join(word)
    if not ends:
        return False
    number = _NUMBER.fullmatch(text)
    sink(_WORDS.get(text) or (text if number else json.dumps(text, ensure_ascii=False)))
    return bool(text)


def _items(read: TextReader, sink: Sink, brackets: str) -> Steps[bool]:
    """A list or a dict."""
    yield from read.take()
    sink(brackets[0])
    first = True
    while True:
        yield from read.take_while(SPACE + ",")
        if (yield from read.accept(brackets[1])):
            sink(brackets[1])
            return True
        if not (yield from read.peek()):
            return False
        sink("" if first else ",")
        first = False
        if not (yield from _literal(read, sink)):
            return False
        if brackets == "{}":
            yield from read.take_while(SPACE)
            if not (yield from read.accept(":")):
                return False
            sink(":")
            if not (yield from _literal(read, sink)):
                return False


def _text(read: TextReader, sink: Sink) -> Steps[bool]:
    quote = yield from read.take()
    sink('"')
    while True:
        stop = yield from read.until_char(quote + "\\", lambda text: sink(escaped(text)))
        if not stop:
            return False
        yield from read.take()
        if stop == quote:
            sink('"')
            return True
        kind = yield from read.take()
        if not kind:
            return False
        if kind in _HEX:
            digits = ""
            while len(digits) < _HEX[kind] and ((yield from read.peek()) or " ") in "0123456789abcdefABCDEF":
                digits += yield from read.take()
            sink(escaped(_char(digits)))
        else:
            sink(escaped(_ESCAPES.get(kind, kind if kind in "\\'\"" else "\\" + kind)))


def _char(digits: str) -> str:
    code = int(digits or "0", 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
