"""Text that comes in pieces, read as if all of it were there.

A format is a generator that reads with these methods (`yield from`); where the text ends for now, it waits.
What a method decides depends on the characters alone, never on how they came: a character that could still
belong to something longer waits for the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

SPACE = " \t\r\n"


class TextReader:
    """A cursor in growing text. After `end` every method sees the end of the text and waits no more."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._pin: int | None = None

    def feed(self, piece: str) -> None:
        """More text."""
        if self._pin is None and self._at:  # what is read is forgotten, unless somebody may ask for it
            self._text, self._at = self._text[self._at :], 0
        self._text += piece

    def end(self) -> None:
        """There will be no more text."""
        self.ended = True

    def pin(self) -> None:
        """Keep the text from here on."""
        self._pin = self._at

    def unpin(self) -> str:
        """What was read since `pin`, which is kept no longer; empty without one."""
        text = "" if self._pin is None else self._text[self._pin : self._at]
        self._pin = None
        return text

    def put_back(self, word: str) -> None:
        """Unread the `word` that was just read."""
        if self._pin is None:
            self._text, self._at = word + self._text[self._at :], 0
        else:
            self._at -= len(word)

    def skip(self) -> None:
        """Read what there is."""
        self._at = len(self._text)

    def peek(self) -> Steps[str]:
        """The next character, which stays; empty at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Steps[str]:
        """The next character; empty at the end."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def take_while(self, chars: str, sink: Sink | None = None) -> Steps[None]:
        """Read characters that are among `chars`."""
        while (char := (yield from self.peek())) and char in chars:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in chars:
                self._at += 1
            if sink is not None:
                sink(self._text[start : self._at])

    def until_char(self, stops: str, sink: Sink) -> Steps[str]:
        """Give text to `sink` up to a character among `stops`, which stays; empty at the end."""
        pattern = _any_char(stops)
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if end > self._at:
                sink(self._text[self._at : end])
                self._at = end
            if found:
                return found[0]
            if self.ended:
                return ""
            yield

    def until(self, markers: tuple[str, ...], sink: Sink, *, drops_begun: bool = False) -> Steps[str]:
        """Give text to `sink` up to the first of `markers`, read it and return it; empty at the end.

        No marker may hold another one: which comes first must not depend on what has come so far.
        `drops_begun`: a marker that the end of the text cuts short is not text.
        """
        pattern, firsts, longest = _any_marker(markers)
        while True:
            found = pattern.search(self._text, self._at) if pattern else None
            if found:
                if found.start() > self._at:
                    sink(self._text[self._at : found.start()])
                self._at = found.end()
                return found[0]
            whole = self.ended and not drops_begun
            safe = len(self._text) if whole else self._safe_end(markers, firsts, longest)
            if safe > self._at:
                sink(self._text[self._at : safe])
                self._at = safe
            if self.ended:
                self._at = len(self._text)
                return ""
            yield

    def accept(self, *words: str) -> Steps[str]:
        """Read one of `words` if the text goes on with it (the longest that does); else read nothing."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            open_ = not self.ended and any(len(word) > len(rest) and word.startswith(rest) for word in words)
            if not open_:
                found = max((word for word in words if rest.startswith(word)), key=len, default="")
                self._at += len(found)
                return found
            yield

    def accept_end(self, *words: str) -> Steps[bool]:
        """`accept` for end markers: one that the end of the text cuts short counts too, if it has begun."""
        if (yield from self.accept(*words)):
            return True
        rest = self._text[self._at :]
        if not (rest and self.ended and any(word.startswith(rest) for word in words)):
            return False
        self._at = len(self._text)
        return True

    def _safe_end(self, markers: tuple[str, ...], firsts: frozenset[str], longest: int) -> int:
        """Where the longest end of the text begins that may become a marker."""
        text = self._text
        begin = max(self._at, len(text) - longest + 1)
        if firsts.isdisjoint(text[begin:]):
            return len(text)
        for at in range(begin, len(text)):
            if text[at] in firsts and any(marker.startswith(text[at:]) for marker in markers):
                return at
        return len(text)


@lru_cache(maxsize=64)
def _any_marker(markers: tuple[str, ...]) -> tuple[re.Pattern[str] | None, frozenset[str], int]:
    """A pattern of them all, their first characters, the length of the longest."""
    for one in markers:
        assert one, "a marker has text"
        assert not any(one != other and one in other for other in markers), (
            f"{one!r} is part of another marker"
        )
    pattern = re.compile("|".join(map(re.escape, markers))) if markers else None
    return pattern, frozenset(marker[0] for marker in markers), max(map(len, markers), default=1)


@lru_cache(maxsize=64)
def _any_char(chars: str) -> re.Pattern[str]:
    return re.compile("[" + re.escape(chars) + "]")
