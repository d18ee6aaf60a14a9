"""A tool call written as a JSON object with a name and arguments."""

from __future__ import annotations

import re

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.json_text import as_string, compact, json_string, json_value
from ostinato.runtime.output.text_reader import SPACE, Steps, TextReader

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type", "index")
_NO_BRACKETS = str.maketrans("", "", "]}")


def is_name(text: str) -> bool:
    """Whether a tool may be called so."""
    return re.fullmatch(r"[\w.\-]{1,256}", text) is not None


def arguments(read: TextReader, answer: Answer, *, ends: tuple[str, ...] = ()) -> Steps[bool]:
    """The arguments of the open call, one JSON value. False if the text ends in it.

    `null`, `""` and nothing at all in front of one of `ends`, which stays, are `{}`; a string that holds
    JSON is that JSON; anything else is passed on as it is.
    """
    yield from read.take_while(SPACE)
    if ends and (end := (yield from read.accept(*ends))):
        read.put_back(end)
        answer.arguments("{}")
        return True
    char = yield from read.peek()
    if char == "{":
        return (yield from json_value(read, answer.arguments))
    literal: list[str] = []
    if ends and char not in ("[", '"'):  # no JSON of more than a word: a marker is none of it
        if end := (yield from read.until(ends, literal.append)):
            read.put_back(end)
        literal = ["".join(literal).strip()]
        whole = bool(literal[0])
    else:
        whole = yield from json_value(read, literal.append)
    text = "".join(literal)
    if not whole and not (text == "" and (yield from read.peek())):
        answer.arguments(text)
        return False
    answer.arguments(_as_object(text))
    return True


def call_object(read: TextReader, answer: Answer, *, marked: bool) -> Steps[bool]:
    """Read `{"name": ..., "arguments": ...}` as a call; False, without events, if it is none.

    `marked` calls are meant as calls, so arguments may be left out, and any name is good.  Without a marker
    it may be an answer in JSON: then the name must be that of a tool, all keys those of a call, and with
    tools unknown there must be arguments.
    """
    name: str | None = None
    early: str | None = None  # arguments that come before the name
    told = False
    if not (yield from read.accept("{")):
        return False
    while True:
        yield from read.take_while(SPACE + ",")
        char = yield from read.peek()
        if char != '"':
            break  # the end of the object, of the text, or of the format
        literal: list[str] = []
        yield from json_string(read, literal.append)
        key = as_string("".join(literal))
        yield from read.take_while(SPACE)
        if not (yield from read.accept(":")):
            break
        yield from read.take_while(SPACE)
        if key == _NAME and name is None:
            literal = []
            if not (yield from json_value(read, literal.append)):
                break
            name = as_string("".join(literal))
            if not name or not (marked or answer.knows(name)):
                return False
        elif key in _ARGUMENTS and not told and early is None:
            if name is None:
                literal = []
                if not (yield from json_value(read, literal.append)):
                    return False
                early = _as_object("".join(literal))
                continue
            answer.start_call(name)
            told = True
            if not (yield from arguments(read, answer)):
                answer.end_call(whole=False)
                return True
        elif marked or key in _OTHERS:
            if not (yield from json_value(read, lambda _: None)):
                break
        else:
            if told:
                break
            return False
    whole = yield from read.accept("}")
    if told:
        answer.end_call()
        return True
    if name is None or not (marked or early is not None or (whole and answer.has_tools)):
        return False
    answer.start_call(name)
    if early is not None or whole:
        answer.arguments(early if early is not None else "{}")
    answer.end_call(whole=bool(early is not None or whole))
    return True


def call_objects(
    read: TextReader, answer: Answer, *, marked: bool, ends: tuple[str, ...] = ()
) -> Steps[bool]:
    """One or more such objects, in a list or in a row, and one of `ends`, which may be missing.

    False, without events, if the first is no call.  What comes behind and is neither call nor end is content.
    """
    yield from read.take_while(SPACE)
    yield from read.accept("[")
    yield from read.take_while(SPACE)
    if not (yield from call_object(read, answer, marked=marked)):
        return False
    while True:
        between: list[str] = []
        yield from read.take_while(SPACE + ",;]}", between.append)
        if ends and (yield from read.accept_end(*ends)):
            return True
        read.pin()
        if (yield from read.peek()) != "{" or not (yield from call_object(read, answer, marked=marked)):
            # The list's end is no content; nor is a brace too many, which models write.
            answer.no_call("".join(between).translate(_NO_BRACKETS) + read.unpin(), read)
            return True


def _as_object(literal: str) -> str:
    text = as_string(literal)
    if text is None:
        return "{}" if literal in ("", "null") else literal
    return compact(text) if text.strip() else "{}"
