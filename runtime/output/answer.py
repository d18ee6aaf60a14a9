"""Where a format puts what it reads: content, reasoning, calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from enum import Enum

from ostinato.runtime.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ostinato.runtime.output.text_reader import SPACE, TextReader

_ID_CHARS = string.ascii_letters + string.digits


def long_id() -> str:
    """An id like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class Enforced(Enum):
    """What a grammar makes sure of: whether the end of an answer that was cut is the beginning of a call."""

    NOTHING = "text that is no call yet is text"
    BEGUN = "what begins as a call is one, wherever it does"
    FRONT = "there are calls and nothing else, or text in which nothing is a call"
    CALLS = "there are calls and nothing else"


class Answer:
    """Collects events; `take` hands them over.

    White space that touches thoughts or a call belongs to the format, so at the ends of content it waits
    until it is known what follows.
    """

    def __init__(
        self,
        *,
        tools: Collection[str] | None,
        new_id: Callable[[], str],
        on_call: Callable[[], object],
        breaks: tuple[str, ...],
        takes_calls: bool,
        enforced: Enforced = Enforced.NOTHING,
    ) -> None:
        """`on_call` is told when a call begins; at one of `breaks` thoughts end although they have no end.

        `takes_calls`: calls are wanted.
        """
        self._enforced = enforced
        self._held = ""  # text where only calls can be: it is one that was cut, if the answer was
        self.takes_calls = takes_calls
        self.breaks = breaks
        self.num_calls = 0
        self.num_thoughts = 0
        self.is_thinking = False
        self.has_content = False  # text that is not white space
        self.ended_itself = False  # the text is over, and nothing cut it
        self._tools = tools
        self._new_id, self._on_call = new_id, on_call
        self._events: list[Event] = []
        self._space = ""
        self._behind_call = False
        self._open = self._has_arguments = False

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    @property
    def has_tools(self) -> bool:
        """Whether the tools are known."""
        return self._tools is not None

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name; True when the tools are not known."""
        return self._tools is None or name in self._tools

    def schema_of(self, name: str) -> Mapping[str, object]:
        """The JSON schema of a tool's arguments; empty if it is not known."""
        found = self._tools.get(name) if isinstance(self._tools, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def content(self, text: str) -> None:
        """More content."""
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            holds = self._holds
            self.has_content, self._behind_call = True, False
            if holds:
                self._held += shown
            else:
                self._events.append(Content(shown))

    def no_call(self, text: str, read: TextReader, *, is_marked: bool = True) -> None:
        """`text` was read as the beginning of a call, and it is none or the whole text ends in it.

        `is_marked`: it began with a marker, or behind a call.
        """
        is_call = (
            self._enforced is Enforced.BEGUN
            or self._holds
            or (self._enforced is Enforced.FRONT and is_marked and not self.has_content)
        )
        if is_call and read.ended and not self.ended_itself:
            read.skip()
            self._space = ""
        else:
            self.content(text)

    def start_thoughts(self) -> None:
        """Reasoning begins."""
        self.num_thoughts += 1
        self.is_thinking = True
        if not self.has_content:
            self._space = ""

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def end_thoughts(self) -> None:
        """Reasoning is over."""
        self.is_thinking = False

    def start_call(self, name: str) -> None:
        """Begin a call."""
        assert not self._open, "calls do not nest"
        self._space, self._open, self._has_arguments = "", True, False
        self._on_call()
        self._events.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the open call."""
        if text:
            self._has_arguments = True
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self, *, whole: bool = True) -> None:
        """End the open call. One that a model ends by itself before any argument has none: `{}`."""
        assert self._open, "a call is open"
        if not whole and self.ended_itself and not self._has_arguments:
            self.arguments("{}")
            whole = True
        self._open, self._behind_call = False, True
        self._events.append(CallEnd(self.num_calls - 1, whole))

    def finish(self) -> None:
        """The text is over: white space that waited behind content is content."""
        is_call = self._holds and not self.ended_itself
        text = self._held + ("" if self._behind_call else self._space)
        if text and not is_call:
            self._events.append(Content(text))
        self._held = self._space = ""

    @property
    def _holds(self) -> bool:
        """Whether text here is a piece of a call."""
        if self._enforced is Enforced.FRONT:
            return self.num_calls > 0 and (bool(self._held) or not self.has_content)
        return self._enforced is Enforced.CALLS
