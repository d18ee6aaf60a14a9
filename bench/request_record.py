"""What one request did, and the numbers that follow from it. docs/bench.md gives the definitions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class RequestRecord:
    """Times are seconds; those called `_at` count from the sending of this request.

    `start_s` and `planned_s` count from the start of the run.  A number that does not exist is None: no first
    token came, or the server said no usage.
    """

    index: int
    start_s: float = 0.0
    planned_s: float = 0.0
    ok: bool = False
    error: str = ""
    first_token_at: float | None = None  # of any channel
    first_content_at: float | None = None  # of the answer proper, without reasoning and tool calls
    end_at: float = 0.0  # last event of a choice; when the failure was seen, for one that failed
    token_times_at: list[float] = field(default_factory=list)  # chunks with generated tokens
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    inputs: int | None = None  # texts that were embedded, documents that were ranked
    output_tokens_from: str = ""  # usage, token_ids or chunks
    turn: int = 0
    text: str = ""

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks that carry generated tokens."""
        times = self.token_times_at
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.first_token_at is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.end_at - self.first_token_at) / (self.output_tokens - 1)

    @property
    def end_s(self) -> float:
        """When it ended, from the start of the run."""
        return self.start_s + self.end_at

    def dump(self, *, with_text: bool) -> dict[str, Any]:
        """As JSON, for `save_requests`."""
        values = asdict(self)
        if not with_text:
            del values["text"]
        return values


def load_record(values: dict[str, Any]) -> RequestRecord:
    """The inverse of `dump`."""
    return RequestRecord(**values)
