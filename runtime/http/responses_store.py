"""Responses that can be asked for again: in memory, at most so many bytes, for at most so long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

KEPT_BYTES = 512  # what Python needs for an entry besides its text, roughly


@dataclass(frozen=True)
class StoredResponse:
    """One response. All of it is JSON text, so that its size is known.

    `history` is the whole conversation up to its end, with what came before by `previous_response_id`;
    `input_items` those that this request brought. `frames` are its events, if it is one of the background
    that was streamed.
    """

    owner: str
    body: str
    input_items: tuple[str, ...]
    output_items: tuple[tuple[str, str], ...]  # id, item
    history: tuple[str, ...]
    background: bool
    frames: tuple[bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """What it counts in the store. Items shared with an earlier response count in both."""
        texts = [self.body, *self.input_items, *self.history, *(item for _, item in self.output_items)]
        return KEPT_BYTES + sum(map(sys.getsizeof, texts)) + sum(map(sys.getsizeof, self.frames))


class ResponseStore:
    """The newest responses. The oldest goes first when room is needed; reading does not make it newer.

    One larger than the whole store is not kept.
    """

    def __init__(self, max_bytes: int, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[str, tuple[float, StoredResponse]] = {}
        self._items: dict[str, tuple[str, str]] = {}  # item id -> response id, item

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response until its time is over or its room is needed."""
        self.delete(response_id)
        self._expire()
        if stored.num_bytes > self.max_bytes:
            return
        while self.num_bytes + stored.num_bytes > self.max_bytes:
            self.delete(next(iter(self._entries)))
        self._entries[response_id] = (self._clock(), stored)
        self.num_bytes += stored.num_bytes
        self._items.update({item_id: (response_id, item) for item_id, item in stored.output_items})

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response, if it is there and this owner's."""
        self._expire()
        _, stored = self._entries.get(response_id, (0.0, None))
        return stored if stored is not None and stored.owner == owner else None

    def item(self, item_id: str, owner: str) -> str | None:
        """An output item of a stored response."""
        response_id, item = self._items.get(item_id, ("", ""))
        return item if self.get(response_id, owner) is not None else None

    def delete(self, response_id: str) -> None:
        """Forget a response. Others that went on from it keep the conversation."""
        _, stored = self._entries.pop(response_id, (0.0, None))
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            for item_id, _ in stored.output_items:
                self._items.pop(item_id, None)

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._entries:
            first = next(iter(self._entries))
            if self._entries[first][0] > oldest:
                return
            self.delete(first)
