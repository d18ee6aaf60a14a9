"""The one way into a running engine: messages from any thread, taken between steps."""

from __future__ import annotations

import threading
from collections import deque

from ostinato.runtime.messages import Order


class Inbox:
    """Keeps the order of arrival. `put`, `wake` and `close` are for any thread, the rest for the engine's."""

    def __init__(self) -> None:
        self._mail: deque[Order] = deque()
        self._news = threading.Event()
        self._is_closed = False

    def put(self, *messages: Order) -> None:
        """Deliver and wake the engine. After `close` messages are dropped."""
        if not self._is_closed:
            self._mail.extend(messages)
            self._news.set()

    def wake(self) -> None:
        """Let a resting engine take a turn."""
        self._news.set()

    def close(self) -> None:
        """Tell the engine to stop after its current step."""
        self._is_closed = True
        self._news.set()

    @property
    def is_closed(self) -> bool:
        """Whether the engine is to stop."""
        return self._is_closed

    def drain(self) -> list[Order]:
        """Everything that has come since the last call."""
        self._news.clear()  # before looking: what comes in between is either taken now or sets it again
        taken = []
        while self._mail:
            taken.append(self._mail.popleft())
        if self._is_closed:
            self._news.set()
        return taken

    def wait(self, seconds: float | None) -> bool:
        """Sleep until there is mail or `close` (True), or until the time is up (False); None: no limit."""
        return self._news.wait(seconds)
