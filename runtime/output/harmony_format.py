"""gpt-oss: every part of an answer is a message on a channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

`analysis` is reasoning, `final` and `commentary` without a recipient are content.  A message to a function is
a call; one to anything else (tools of the model's own) is reasoning.  The end markers may be missing where
the answer ends.
"""

from __future__ import annotations

import re

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.call_object import arguments
from ostinato.runtime.output.formats import OutputFormat, ReasoningFormat, ToolFormat
from ostinato.runtime.output.text_reader import SPACE, Sink, Steps, TextReader

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
THOUGHTS, THOUGHTS_END = f"{_CHANNEL}analysis{_MESSAGE}", f"<|end|>{_START}assistant"
FINAL = f"{_CHANNEL}final{_MESSAGE}"
_TO = re.compile(r"\bto=([\w.\-]+)")


class _Harmony(OutputFormat):
    name = "gpt_oss"
    starts = (_CHANNEL, _START)
    inner = (*_ENDS, _MESSAGE, "<|constrain|>")
    is_special = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return (*_ENDS, _MESSAGE)

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        header: list[str] = [start]
        if not start.endswith(_MESSAGE):  # or the prompt has said it
            marker = yield from read.until((_MESSAGE, *_ENDS), header.append)
            if marker != _MESSAGE:
                return True  # a header without a message says nothing
        text = "".join(header)
        to = _TO.search(text)
        if to and to[1].startswith("functions.") and answer.takes_calls:
            yield from self._call(read, answer, to[1].removeprefix("functions."))
        elif to or re.search(r"<\|channel\|>\s*analysis", text):
            answer.start_thoughts()
            yield from self._until_end(read, answer.reasoning)
            answer.end_thoughts()
        else:
            yield from self._until_end(read, answer.content)
        return True

    def _call(self, read: TextReader, answer: Answer, name: str) -> Steps[None]:
        answer.start_call(name)
        whole = yield from arguments(read, answer, ends=_ENDS)
        answer.end_call(whole=whole)
        yield from read.take_while(SPACE)
        yield from read.accept_end(*_ENDS)

    def _until_end(self, read: TextReader, sink: Sink) -> Steps[None]:
        marker = yield from read.until((*_ENDS, _START, _CHANNEL), sink)
        if marker in (_START, _CHANNEL):  # the end is missing
            read.put_back(marker)


class HarmonyThoughts(_Harmony, ReasoningFormat):
    """The channels; with it calls are found too, if they are wanted."""

    spans = ((THOUGHTS, THOUGHTS_END),)
    span_ends = (*_ENDS, _START, _CHANNEL)

    def begun(self, prompt_end: str) -> str:
        _, start, message = prompt_end.rpartition(THOUGHTS)
        return "" if any(end in message for end in self.span_ends) else start

    def end_of(self, start: str) -> str:
        return THOUGHTS_END if start == THOUGHTS else ""

    def awaits_message(self, prompt_end: str) -> bool:
        """Whether a prompt ends where the next message begins."""
        return prompt_end.rstrip().endswith(f"{_START}assistant")


class HarmonyCalls(_Harmony, ToolFormat):
    """Calls alone: thoughts are still told apart, as the text has no other form."""
