"""DeepSeek V3's and R1's tool calls, and the shorter form of V3.1.

Calls stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`. A call of V3 is
`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a fenced block of JSON, `<｜tool▁call▁end｜>`; one of V3.1
`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.call_object import arguments, is_name
from ostinato.runtime.output.formats import ToolFormat
from ostinato.runtime.output.text_reader import SPACE, Steps, TextReader

_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALLS_END, _CALL_END = "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"


class DeepSeek(ToolFormat):
    """Both forms; the word in front of the separator tells them apart."""

    name = "deepseek_v3"
    starts = (_CALLS, _CALL)
    inner = (_CALLS_END, _CALL_END, _SEP)

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CALL in template

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return (_CALLS_END, _CALL_END) if answer.num_calls else ()

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        yield from read.take_while(SPACE)
        if start == _CALLS and not (yield from read.accept(_CALL)):
            return False
        header: list[str] = []
        if not (yield from read.until((_SEP,), header.append)):
            return False
        name = "".join(header).strip()
        if name == "function":
            header = []
            yield from read.until_char("\n`{", header.append)
            name = "".join(header).strip()
        if not is_name(name):
            return False
        yield from read.take_while(SPACE)
        if fenced := (yield from read.accept_end("```")):
            yield from read.accept_end("json")
            yield from read.take_while(SPACE)
        answer.start_call(name)
        answer.end_call(whole=(yield from arguments(read, answer, ends=("```", _CALL_END))))
        yield from read.take_while(SPACE)
        if fenced and (yield from read.accept_end("```")):
            yield from read.take_while(SPACE)
        if (yield from read.accept_end(_CALL_END)):
            yield from read.take_while(SPACE, answer.content)
            yield from read.accept_end(_CALLS_END)
        return True
