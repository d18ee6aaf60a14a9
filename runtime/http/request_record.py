"""What is remembered of one HTTP request until it is over: for its log line, its trace and its allowance."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from ostinato.runtime.http.api_keys import Caller


@dataclass(slots=True)
class SequenceTimes:
    """One generated sequence. Times are of `time.monotonic`, in seconds."""

    prompt_tokens: int
    started: float = field(default_factory=time.monotonic)
    queued_s: float | None = None  # from `started` to the first step with it, if the engine said so
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    generated_tokens: int = 0
    outcome: str = ""


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request; its sequences are added where they are generated."""

    id: str
    started: float = field(default_factory=time.monotonic)
    caller: Caller | None = None  # None: no key was looked at (yet), or a wrong one came
    sequences: list[SequenceTimes] = field(default_factory=list)

    def begin(self, prompt_tokens: int) -> SequenceTimes:
        """A sequence goes to the engine; its prompt counts for the caller's allowance."""
        times = SequenceTimes(prompt_tokens)
        self.sequences.append(times)
        self._spend(prompt_tokens)
        return times

    def tokens(self, times: SequenceTimes, count: int) -> None:
        """`count` tokens of the answer came."""
        times.generated_tokens += count
        self._spend(count)

    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to the first token of any of its sequences."""
        first = [times.first_token for times in self.sequences if times.first_token is not None]
        return min(first) - self.started if first else None

    def _spend(self, tokens: int) -> None:
        if self.caller is not None:
            self.caller.allowance.spend(tokens)


# Set once per HTTP request, in its own task.  Every route generates in its own way, some in tasks that
# outlive the request; a parameter would have to be carried through all of them for the sake of counting.
CURRENT: ContextVar[RequestRecord | None] = ContextVar("ostinato_request", default=None)
