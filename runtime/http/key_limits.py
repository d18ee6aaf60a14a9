"""What one caller may still use: requests at once, requests and tokens per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ostinato.errors import RequestError
from ostinato.runtime.config import LimitsConfig

_MINUTE_S = 60.0
CONCURRENT_RETRY_S = 1.0  # nobody knows when a running answer ends


class RateLimited(RequestError):
    """A limit of this API key is reached; `retry_after_s` says when it is worth asking again."""

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Allowance:
    """The use of one caller. `enter` and `leave` each request; `spend` tokens as they come."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.running = 0
        self._requests = _Bucket(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        self._tokens = _Bucket(limits.tokens_per_minute, clock) if limits.tokens_per_minute else None

    def enter(self) -> None:
        """Count one more request. RateLimited when it is one too many; then nothing is counted."""
        limits = self.limits
        if limits.concurrent and self.running >= limits.concurrent:
            raise RateLimited(
                f"{self.running} requests of this key are running; at most {limits.concurrent} may at once",
                limit="concurrent",
                retry_after_s=CONCURRENT_RETRY_S,
            )
        if self._tokens is not None and (wait_s := self._tokens.seconds_until(0.0)) > 0:
            raise RateLimited(
                f"this key may use {limits.tokens_per_minute} tokens a minute; {self._tokens.debt} more "
                "than that are used",
                limit="tokens_per_minute",
                retry_after_s=wait_s,
            )
        if self._requests is not None:
            if (wait_s := self._requests.seconds_until(1.0)) > 0:
                raise RateLimited(
                    f"this key may send {limits.requests_per_minute} requests a minute",
                    limit="requests_per_minute",
                    retry_after_s=wait_s,
                )
            self._requests.take(1)
        self.running += 1

    def leave(self) -> None:
        """A request that entered is over."""
        self.running -= 1

    def spend(self, tokens: int) -> None:
        """Tokens of a prompt or an answer. They are counted even beyond the limit: the next request waits."""
        if self._tokens is not None:
            self._tokens.take(tokens)


class _Bucket:
    """Fills at `per_minute` up to that many; may be overdrawn."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def debt(self) -> int:
        """How far it is overdrawn."""
        return math.ceil(max(0.0, -self._level))

    def take(self, amount: int) -> None:
        self._fill()
        self._level -= amount

    def seconds_until(self, level: float) -> float:
        """Until the level is `level`, or above 0 for 0: nothing is left at exactly 0 tokens."""
        self._fill()
        missing = level - self._level
        if missing < 0 or (missing == 0 and level > 0):
            return 0.0
        return max(missing, 1e-3) * _MINUTE_S / self._per_minute

    def _fill(self) -> None:
        now = self._clock()
        grown = self._level + (now - self._at) * self._per_minute / _MINUTE_S
        self._level, self._at = min(float(self._per_minute), grown), now
