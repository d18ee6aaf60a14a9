"""How models mark their thoughts, except gpt-oss (harmony_format.py)."""

from __future__ import annotations

from typing import ClassVar

from ostinato.runtime.output.answer import Answer
from ostinato.runtime.output.formats import ReasoningFormat
from ostinato.runtime.output.text_reader import SPACE, Steps, TextReader


class MarkedThoughts(ReasoningFormat):
    """Thoughts between a start and an end marker.

    Line ends at both ends of the thoughts, and in front of the content that follows, are the template's.
    Thoughts without an end go on to the end of the text, or, with special tokens, to a tool call.  An end
    without a start is not shown; the text in front of it has been shown as content by then.
    """

    ends: ClassVar[tuple[str, ...]]

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.inner)

    def end_of(self, start: str) -> str:
        return self.ends[self.starts.index(start)] if start else ""

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return self.ends if self.is_special or not answer.num_thoughts else ()

    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        answer.start_thoughts()
        lines = ""

        def without_last_lines(text: str) -> None:
            nonlocal lines
            text = lines + text
            shown = text.rstrip("\r\n")
            lines = text[len(shown) :]
            answer.reasoning(shown)

        yield from read.take_while("\r\n")
        yield from read.accept(*self.starts)  # some models repeat the one in the prompt
        yield from self.label(read)
        yield from read.take_while("\r\n")
        marker = yield from read.until((*self.ends, *answer.breaks), without_last_lines)
        answer.end_thoughts()
        if marker in answer.breaks:
            read.put_back(marker)
        elif marker:
            yield from self.behind(read)
        return True

    def label(self, read: TextReader) -> Steps[None]:
        """Skip what stands between the start and the thoughts."""
        return
        yield

    def behind(self, read: TextReader) -> Steps[None]:
        """Skip what stands between the end and the content."""
        yield from read.take_while("\r\n")


class ThinkTags(MarkedThoughts):
    """`<think>` ... `</think>`: Qwen3 and many others."""

    name = "qwen3"
    starts = ("<think>",)
    ends = ("</think>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<think>" in template or "</think>" in template


class MiniMaxThoughts(ThinkTags):
    """The same tags; the start is always in the prompt."""

    name = "minimax"

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<minimax:tool_call>" in template or ("]~b]" in template and "think>" in template)

    def begun(self, prompt_end: str) -> str:
        return "" if prompt_end.rstrip().endswith(self.ends) else self.starts[0]


class DeepSeekThoughts(ThinkTags):
    """The same tags; the answer begins with thoughts unless the prompt ends with their end."""

    name = "deepseek_r1"

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<｜Assistant｜>" in template and "</think>" in template

    def begun(self, prompt_end: str) -> str:
        return "" if prompt_end.rstrip().endswith(self.ends) else self.starts[0]


class MistralThoughts(MarkedThoughts):
    """`[THINK]` ... `[/THINK]`, special tokens."""

    name = "mistral"
    starts = ("[THINK]",)
    ends = ("[/THINK]",)
    is_special = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return "[THINK]" in template


class GraniteThoughts(MarkedThoughts):
    """Granite 3.2 says it in words; 3.3 has `<think>` and, around the answer, `<response>`."""

    name = "granite"
    starts = ("Here is my thought process:", "Here's my thought process:", "<think>")
    ends = ("Here is my response:", "Here's my response:", "</think>")
    inner = ("<response>", "</response>")

    @classmethod
    def fits(cls, template: str) -> bool:
        tags = "<|start_of_role|>" in template and "<think>" in template
        return tags or "Here is my thought process" in template

    def strays(self, answer: Answer) -> tuple[str, ...]:
        return ("</response>",) if answer.num_thoughts else ("</think>",)

    def behind(self, read: TextReader) -> Steps[None]:
        yield from read.take_while(SPACE)
        if (yield from read.accept("<response>")):
            yield from read.take_while("\r\n")


class Gemma4Thoughts(MarkedThoughts):
    """`<|channel>thought` ... `<channel|>`, special tokens around a label that is not shown.

    Text in front of the channel is content.  A label cut short by the end of the text is a label.
    """

    name = "gemma4"
    starts = ("<|channel>",)
    ends = ("<channel|>",)
    is_special = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|channel>" in template and "<channel|>" in template

    def begun(self, prompt_end: str) -> str:
        end = prompt_end.rstrip()
        return self.starts[0] if end.endswith(("<|channel>", "<|channel>thought")) else ""

    def label(self, read: TextReader) -> Steps[None]:
        word = ""
        while (char := (yield from read.peek())) and "thought\n".startswith(word + char):
            word += yield from read.take()
        if char and word not in ("thought\n", ""):
            rest = yield from read.accept(*self.ends) if word == "thought" else _no_word()
            read.put_back(rest or word)


def _no_word() -> Steps[str]:
    return ""
    yield
