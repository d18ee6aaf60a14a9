"""A model's text becomes events: the one loop around all formats."""

from __future__ import annotations

from collections.abc import Collection

from ostinato.runtime.output.answer import Answer, Enforced, long_id
from ostinato.runtime.output.events import Event, join
from ostinato.runtime.output.formats import OutputFormat, ReasoningFormat, ToolFormat
from ostinato.runtime.output.text_reader import SPACE, Steps, TextReader


class OutputParser:
    """Feed one answer's text in pieces, get events.

    `tools`: names of the tools that may be called, or a mapping of them to the schemas of their arguments;
    None if they are not known.  Only formats without markers, or without types, look at them.
    `prompt_end`: how the prompt ended, since thinking may have begun there.
    `enforced`: what a grammar makes sure of.  The beginning of a call that the end of the answer cut is text
    only where it can be.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: ToolFormat | None,
        *,
        tools: Collection[str] | None = None,
        prompt_end: str = "",
        enforced: Enforced = Enforced.NOTHING,
    ) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._begun = reasoning.begun(prompt_end) if reasoning is not None else ""
        self._read = TextReader()
        self._answer = Answer(
            tools=tools,
            new_id=calls.new_id if calls is not None else long_id,
            on_call=self._read.unpin,
            takes_calls=calls is not None,
            breaks=calls.starts if calls is not None and calls.is_special else (),
            enforced=enforced,
        )
        self._steps = self._run()
        self._over = False
        self._advance()  # thinking may have begun before the first token

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._answer.num_calls

    @property
    def is_thinking(self) -> bool:
        """Whether the text has got into thoughts and not out of them."""
        return self._answer.is_thinking

    def push(self, text: str) -> list[Event]:
        """Events that this text completes."""
        if not text:
            return []
        self._read.feed(text)
        return self._advance()

    def finish(self, *, by_itself: bool = False) -> list[Event]:
        """Events of what was held back: no more text comes. `by_itself`: the model has ended it."""
        self._answer.ended_itself = by_itself
        self._read.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        if not self._over:
            try:
                next(self._steps)
            except StopIteration:
                self._over = True
                self._answer.finish()
        events = self._answer.take()
        return events if len(events) < 2 else join(events)

    def _run(self) -> Steps[None]:
        read, answer, calls = self._read, self._answer, self._calls
        if self._reasoning is not None and self._begun:
            yield from self._region(self._reasoning, self._begun)
        while True:
            if not answer.has_content:
                yield from read.take_while(SPACE, answer.content)
                if calls is not None and calls.bare and ((yield from read.peek()) or " ") in calls.bare:
                    yield from self._region(calls, "")
                    continue
            owners = self._owners()
            if answer.has_content or not owners:
                marker = yield from read.until(tuple(owners), answer.content)
            else:
                marker = yield from read.accept(*owners)
                if not marker and (char := (yield from read.take())):
                    answer.content(char)  # no longer in front
                    continue
            if not marker:
                return
            if (owner := owners[marker]) is not None:
                yield from self._region(owner, marker)

    def _region(self, owner: OutputFormat, start: str) -> Steps[None]:
        if isinstance(owner, ToolFormat):
            self._read.pin()
        if not (yield from owner.region(self._read, self._answer, start)):
            self._answer.no_call(start + self._read.unpin(), self._read, is_marked=bool(start))
        self._read.unpin()

    def _owners(self) -> dict[str, OutputFormat | None]:
        """What begins at each marker, at this point; None: nothing, but it is not shown."""
        owners: dict[str, OutputFormat | None] = {}
        for one in (self._calls, self._reasoning):  # a marker of both is the reasoning format's
            if one is not None:
                owners |= dict.fromkeys(one.strays(self._answer))
        for one in (self._calls, self._reasoning):
            if one is not None and (
                isinstance(one, ToolFormat) or one.is_special or not self._answer.has_content
            ):
                owners |= dict.fromkeys(one.starts, one)
        return owners
