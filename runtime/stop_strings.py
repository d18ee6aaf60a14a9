"""Stop strings in streamed text: hold back only what can still become one.

Each stop string is followed by its own Knuth-Morris-Pratt automaton, one step per character, so neither the
result nor the cost depends on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Feed text in pieces; get back what may be shown.

    The stop string whose last character comes first wins; of several that end on one character, the longest.
    After a match the scanner is spent.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is safe to show now.

        On a match `matched` is set and the rest of `piece` is dropped.
        """
        if not self._held and self._first.isdisjoint(piece):
            return piece
        text = self._held + piece
        for at in range(len(self._held), len(text)):
            matched = self._step(text[at])
            if matched is not None:
                self.matched, self._held = matched, ""
                end = at + 1
                return text[:end] if self._include else text[: end - len(matched)]
        hold = max(self._state)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back and will not become a stop string any more."""
        held, self._held = self._held, ""
        self._state = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> str | None:
        matched = None
        for which, stop in enumerate(self._stops):
            failure, state = self._failure[which], self._state[which]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                matched = matched or stop  # the longest comes first
                state = 0
            self._state[which] = state
        return matched


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        if stop[at] == stop[length]:
            length += 1
        table[at] = length
    return table
