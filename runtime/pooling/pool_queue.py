"""Inputs that wait for a step, best first. No torch."""

from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple

from ostinato.runtime.messages import PoolRequest


class Waiting(NamedTuple):
    """A request in the queue; the order is that of its first two fields."""

    priority: int
    number: int  # by arrival; unique
    arrived_s: float
    request: PoolRequest


class PoolQueue:
    """Every input is computed whole, in one step."""

    def __init__(self, *, max_step_tokens: int, max_step_sequences: int) -> None:
        self._max_tokens, self._max_sequences = max_step_tokens, max_step_sequences
        self._heap: list[Waiting] = []
        self._live: dict[str, int] = {}  # name -> number
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def add(self, request: PoolRequest, now_s: float) -> None:
        """Let it wait. Its name is not in the queue."""
        waiting = Waiting(request.priority, next(self._numbers), now_s, request)
        self._live[request.request_id] = waiting.number
        heapq.heappush(self._heap, waiting)

    def drop(self, name: str) -> bool:
        """Forget a request; False: it does not wait."""
        return self._live.pop(name, None) is not None

    def names(self) -> list[str]:
        """Of all that wait."""
        return list(self._live)

    def take(self) -> list[Waiting]:
        """The next step: as many as fit, in order; one that is longer than a step shall be has one alone."""
        taken: list[Waiting] = []
        tokens = 0
        while self._heap and len(taken) < self._max_sequences:
            first = self._heap[0]
            if self._live.get(first.request.request_id) != first.number:  # dropped
                heapq.heappop(self._heap)
                continue
            tokens += len(first.request.token_ids)
            if taken and tokens > self._max_tokens:
                break
            taken.append(heapq.heappop(self._heap))
            del self._live[first.request.request_id]
        return taken

    def check(self) -> None:
        """Raise AssertionError when heap and names do not agree."""
        numbers = {waiting.number for waiting in self._heap}
        assert numbers >= set(self._live.values()), "a request waits that no step will take"
