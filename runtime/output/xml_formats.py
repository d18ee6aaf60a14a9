"""Tool calls in tags, with the arguments as text: Qwen3-Coder and MiniMax.

    <function=NAME>                     <invoke name="NAME">
    <parameter=KEY>                     <parameter name="KEY">VALUE</parameter>
    VALUE                               </invoke>
    </parameter>
    </function>

The text does not say what type a value has. Where the tool's schema says "string" it is one; else it is JSON
if it can be read as such, and a string if not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.call_object import is_name
from ostinato.runtime.output.formats import ToolFormat
from ostinato.runtime.output.json_text import compact, escaped, is_json
from ostinato.runtime.output.text_reader import SPACE, Steps, TextReader

_VALUE_END = "</parameter>"


class _Tags(ToolFormat):
    call: ClassVar[str]  # in front of the name, which `tag_end` ends
    call_end: ClassVar[str]
    parameter: ClassVar[str]
    tag_end: ClassVar[str]
    end: ClassVar[str]

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, self.end)

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return (self.end,) if answer.num_calls else ()

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        bare = start == self.call  # the tag around the call was left out
        if not bare:
            yield from read.take_while(SPACE)
        first = True
        while (bare and first) or (yield from read.accept(self.call)):
            name: list[str] = []
            yield from read.until_char(f"{self.tag_end[0]}\n", name.append)
            ended = yield from read.accept(self.tag_end)
            called = "".join(name).strip()
            if not ended or not is_name(called) or (bare and first and not answer.knows(called)):
                break
            first = False
            answer.start_call(called)
            whole = yield from self._arguments(read, answer, called)
            answer.end_call(whole=whole)
            between: list[str] = []
            yield from read.take_while(SPACE, between.append)
            if (yield from read.accept_end(self.end)):
                return True
            answer.content("".join(between))
        if not first and read.ended:  # a tag that the end of the text cuts short is none of it
            yield from read.accept_end(self.call, self.tag_end)
        return not first

    def _arguments(self, read: TextReader, answer: Answer, called: str) -> Steps[bool]:
        answer.arguments("{")
        comma = ""
        while True:
            yield from read.take_while(SPACE)
            if (yield from read.accept(self.call_end)):
                answer.arguments("}")
                return True
            # whoever ends a call without its tag has ended its arguments
            if end := (yield from read.accept(self.end)):
                read.put_back(end)
            if end or ((yield from read.peek()) == "" and answer.ended_itself):
                answer.arguments("}")
                return True
            if not (yield from read.accept(self.parameter)):
                yield from read.accept_end(self.call_end, self.parameter)
                return False
            key: list[str] = []
            if not (yield from read.until((self.tag_end,), key.append)):
                return False
            name = "".join(key).strip()
            answer.arguments(f"{comma}{json.dumps(name, ensure_ascii=False)}:")
            comma = ","
            kinds = value_types(answer.schema_of(called), name)
            if not (yield from self._value(read, answer, kinds)):
                return False

    def _value(self, read: TextReader, answer: Answer, kinds: set[str]) -> Steps[bool]:
        """One line end at each side belongs to the tags."""
        if not (yield from read.accept("\r\n")):
            yield from read.accept("\n")
        if kinds == {"string"}:  # it may be long, so it is passed on as it comes
            held = ""

            def say(text: str) -> None:
                nonlocal held
                text = held + text
                shown = text[:-1] if text.endswith("\n") else text
                held = text[len(shown) :]
                answer.arguments(escaped(shown))

            answer.arguments('"')
            whole = yield from read.until((_VALUE_END,), say, drops_begun=True)
            if whole:
                answer.arguments('"')
            return bool(whole)
        value: list[str] = []
        if not (yield from read.until((_VALUE_END,), value.append)):
            return False
        text = "".join(value).removesuffix("\n").removesuffix("\r")
        answer.arguments(compact(text) if is_json(text) else json.dumps(text, ensure_ascii=False))
        return True


class Qwen3Xml(_Tags):
    """Qwen3-Coder and Qwen 3.5: inside of `<tool_call>`, which they leave out at times."""

    name = "qwen3_xml"
    starts = ("<tool_call>", "<function=")
    end = "</tool_call>"
    call, tag_end, call_end, parameter = "<function=", ">", "</function>", "<parameter="

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<function=" in template and "<tool_call>" in template


class MiniMax(_Tags):
    """MiniMax M2."""

    name = "minimax"
    starts = ("<minimax:tool_call>",)
    end = "</minimax:tool_call>"
    call, tag_end, call_end, parameter = '<invoke name="', '">', "</invoke>", '<parameter name="'

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<minimax:tool_call>" in template


def value_types(schema: Mapping[str, object], key: str) -> set[str]:
    """Types that the schema of a tool's arguments allows for a key; empty if it does not say."""
    properties = schema.get("properties")
    value = properties.get(key) if isinstance(properties, Mapping) else None
    kinds: set[str] = set()
    for one in (value, *_alternatives(value)):
        kind = one.get("type") if isinstance(one, Mapping) else None
        kinds |= {kind} if isinstance(kind, str) else set(map(str, kind)) if isinstance(kind, list) else set()
    return kinds


def _alternatives(value: object) -> list[object]:
    if not isinstance(value, Mapping):
        return []
    return [one for key in ("anyOf", "oneOf") if isinstance(found := value.get(key), list) for one in found]
