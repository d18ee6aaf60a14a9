"""Sequences in rank order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ostinato.runtime.scheduling.sequence import Sequence


class RankedQueue:
    """A sorted list: O(log n) comparisons and one memory move per change."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def add(self, sequence: Sequence) -> None:
        """Insert by rank."""
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out; it must be there."""
        index = bisect_left(self._items, sequence.rank, key=_rank)
        assert self._items[index] is sequence, f"{sequence.request_id} is not in this queue"
        del self._items[index]


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
