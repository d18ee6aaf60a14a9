"""Tool calls as JSON objects behind a marker or, for Llama, without one."""

from __future__ import annotations

from typing import ClassVar

from ostinato.runtime.output.answer import Answer, short_id
from ostinato.runtime.output.call_object import arguments, call_objects, is_name
from ostinato.runtime.output.formats import ToolFormat
from ostinato.runtime.output.text_reader import SPACE, Steps, TextReader


class MarkedJson(ToolFormat):
    """Objects, or lists of them, behind a start marker; text that is no call is content, marker and all.

    A closing brace too many and a missing end marker are forgiven.
    """

    ends: ClassVar[tuple[str, ...]] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.inner)

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return self.ends if answer.num_calls else ()

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        return (yield from call_objects(read, answer, marked=True, ends=self.ends))


class Hermes(MarkedJson):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4."""

    name = "hermes"
    starts = ("<tool_call>",)
    ends = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<tool_call>" in template


class Granite(MarkedJson):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`; Granite 3.0 wrote `<tool_call>`."""

    name = "granite"
    starts = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|tool_call|>" in template


class Phi(MarkedJson):
    """`functools[{...}]` or `<|tool_call|>[{...}]<|/tool_call|>`: Phi-4-mini."""

    name = "phi"
    starts = ("<|tool_call|>", "functools[")
    ends = ("<|/tool_call|>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|tool|>" in template or "functools" in template


class Mistral(MarkedJson):
    """`[TOOL_CALLS][{...}]` or, since version 11, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    name = "mistral"
    starts = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    is_special = True
    new_id = staticmethod(short_id)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        yield from read.take_while(SPACE)
        if ((yield from read.peek()) or "{") in "[{":
            return (yield from super().region(read, answer, start))
        header: list[str] = []
        yield from read.until_char("{[\n", header.append)
        name = "".join(header).strip()
        if (yield from read.accept("[CALL_ID]")):
            yield from read.until_char("{[", lambda _: None)
        begun = yield from read.accept("[ARGS]")
        yield from read.take_while(SPACE)
        char = yield from read.peek()
        is_call = char == "{" or (begun and char == "")  # or the text ends before the arguments
        if not is_call or not is_name(name):
            return False
        answer.start_call(name)
        answer.end_call(whole=(yield from arguments(read, answer)))
        return True


class LlamaJson(MarkedJson):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or behind `<|python_tag|>`; several with `;`.

    In front of all content only, and only for the name of a known tool: else it is an answer in JSON.
    """

    name = "llama3_json"
    starts = ("<|python_tag|>",)
    ends = ("<|eom_id|>",)
    bare = "{"

    @classmethod
    def fits(cls, template: str) -> bool:
        return '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template)

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        return (yield from call_objects(read, answer, marked=False, ends=self.ends))
