"""What a format is: where it begins in a model's text, and how the text is read from there on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from ostinato.runtime.output.answer import Answer, long_id
from ostinato.runtime.output.text_reader import Steps, TextReader


class OutputFormat(ABC):
    """Base of both kinds of format. Has no state: one object serves all answers.

    No start or stray marker may be part of another one of the same model.
    """

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]] = ()
    """Markers that begin a region; `region` reads on behind one of them."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Further markers inside a region; with the others, the special tokens that the text must have."""
    is_special: ClassVar[bool] = False
    """Whether markers are never ordinary text: then they are obeyed everywhere and never shown."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.starts, *self.inner)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template writes so."""
        return False

    def strays(self, answer: Answer) -> tuple[str, ...]:
        """Markers that mean nothing where they stand alone and are not shown there, at this point."""
        return ()

    @abstractmethod
    def region(self, read: TextReader, answer: Answer, start: str) -> Steps[bool]:
        """Read what `start` began. False: it was no such thing, so all that was read of it is content.

        False must not come after an event of this region.
        """


class ReasoningFormat(OutputFormat):
    """How a model marks its thoughts. They begin in front of all content, or anywhere if `is_special`."""

    def begun(self, prompt_end: str) -> str:
        """The start marker that the prompt ends with, if thinking has begun in it; else empty."""
        end = prompt_end.rstrip()
        return next((start for start in self.starts if end.endswith(start)), "")

    def end_of(self, start: str) -> str:
        """The marker that ends thoughts begun with `start`; empty for no start."""
        return ""

    @property
    def spans(self) -> tuple[tuple[str, str], ...]:
        """For a thinking budget: texts that begin thoughts, each with the one that closes them.

        What closes thoughts must end with one of `span_ends`, or with more that the format wants behind it.
        """
        return tuple((start, end) for start in self.starts if (end := self.end_of(start)))

    @property
    def span_ends(self) -> tuple[str, ...]:
        """For a thinking budget: any of these ends thoughts, if the model says it."""
        return tuple(dict.fromkeys(end for _, end in self.spans))


class ToolFormat(OutputFormat):
    """How a model writes tool calls."""

    bare: ClassVar[str] = ""
    """First characters of calls without a marker, in front of all content; `region` gets an empty start."""
    new_id: Callable[[], str] = staticmethod(long_id)
