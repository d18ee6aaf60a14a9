"""The thoughts of an engine's requests that have a budget: from `start` to `close`, token by token.

Marks are found in text, so the first such request waits until the tokenizer is read, on a thread of its own;
the scheduler keeps it parked meanwhile. All else runs on the engine's thread, and costs nothing while no
request has a budget.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from ostinato.errors import InvalidRequest
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.grammar.grammar_state import Mask
from ostinato.runtime.messages import GenerateRequest, Thoughts
from ostinato.runtime.scheduling.plan import Plan
from ostinato.runtime.thinking.thinking_state import ThinkingState
from ostinato.runtime.token_limits import NO_LIMITS, Limit, mask_without

log = logging.getLogger(__name__)

PARAM = "thinking_token_budget"
MAX_STARTS = 64  # sets of starts whose tokens are kept; a model has one
_NOBODY: frozenset[str] = frozenset()


class _Tokens(NamedTuple):
    """What is to be known of a model's tokens."""

    bytes_of: Callable[[int], bytes]
    bar: Mask | None  # all but those that hold a start; None: there are none


class _Follower(NamedTuple):
    state: ThinkingState
    bar: Mask | None


class RequestThoughts:
    """Those of the requests that have a budget and may still think."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, *, wake: Callable[[], None]) -> None:
        """Nothing is read before the first request; `wake` is called from another thread when it is."""
        self._reader = _Reader(tokenizer_json, vocab_size)
        self._wake = wake
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[tuple[str, ...], Future[_Tokens]] = {}
        self._waiting: dict[str, Thoughts] = {}
        self._followers: dict[str, _Follower] = {}

    @property
    def num_requests(self) -> int:
        """Requests that wait or are followed."""
        return len(self._waiting) + len(self._followers)

    def start(self, request: GenerateRequest, thoughts: Thoughts) -> None:
        """Follow a request; it may run when `take_ready` says so."""
        if len(self._jobs) >= MAX_STARTS:
            wanted = {_barred_starts(waiting) for waiting in self._waiting.values()}
            self._jobs = {starts: job for starts, job in self._jobs.items() if starts in wanted}
        self._waiting[request.request_id] = thoughts
        starts = _barred_starts(thoughts)
        if starts not in self._jobs:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "tokens")
            self._jobs[starts] = job = self._pool.submit(self._reader.read, starts)
            job.add_done_callback(lambda _: self._wake())

    def take_ready(self) -> list[tuple[str, InvalidRequest | None]]:
        """Requests that may run; those with an error are to be refused."""
        ready: list[tuple[str, InvalidRequest | None]] = []
        failed: set[tuple[str, ...]] = set()
        for name, thoughts in [*self._waiting.items()]:
            starts = _barred_starts(thoughts)
            job = self._jobs[starts]
            if not job.done():
                continue
            del self._waiting[name]
            refusal = None
            if (error := job.exception()) is None:
                tokens = job.result()
                self._followers[name] = _Follower(ThinkingState(thoughts, tokens.bytes_of), tokens.bar)
            else:
                failed.add(starts)
                refusal = InvalidRequest(f"{PARAM}: the tokenizer could not be read: {error}", param=PARAM)
            ready.append((name, refusal))
        for starts in failed:
            log.error("the tokenizer could not be read", exc_info=self._jobs[starts].exception())
            del self._jobs[starts]  # the next request tries again
        return ready

    def knows_next(self, request_id: str) -> bool:
        """Whether a token of a request can be decided before the one in front of it is known."""
        follower = self._followers.get(request_id)
        return follower is None or follower.state.knows_next

    def limits(self, plan: Plan, masks: Mapping[str, Limit]) -> Mapping[str, Limit]:
        """`masks` of a plan together with the tokens that are forced or barred in it."""
        if not self._followers:
            return masks
        limits = dict(masks)
        for entry in plan.entries:
            follower = self._followers.get(entry.request_id) if entry.samples else None
            if follower is None:
                continue
            state, bar = follower
            ahead = entry.output_index - state.taken
            forced = state.forced(ahead)
            if forced is not None:
                limits[entry.request_id] = forced
            elif bar is not None and state.is_barred(ahead):
                mask = masks.get(entry.request_id)
                limits[entry.request_id] = bar if mask is None else bar & mask
        return limits or NO_LIMITS

    def take(self, tokens: Mapping[str, int]) -> Set[str]:
        """Answers go on with these tokens. Returns those of them that had a budget."""
        if not self._followers:
            return _NOBODY
        mine = tokens.keys() & self._followers.keys()
        for name in mine:
            state = self._followers[name].state
            state.take(tokens[name])
            if state.is_over:
                self.close(name)
        return mine

    def close(self, request_id: str) -> None:
        """A request has ended, in whatever state; unknown ids are ignored."""
        self._waiting.pop(request_id, None)
        self._followers.pop(request_id, None)

    def shut(self) -> None:
        """Stop the thread; what it is doing is finished first."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class _Reader:
    """Reads the tokenizer once. One thread at a time."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._path))

    @cached_property
    def _codec(self) -> TokenCodec:
        return TokenCodec(self._tokenizer)

    def read(self, starts: Sequence[str]) -> _Tokens:
        """What must be known to bar these starts."""
        barred = sorted({token for start in starts for token in self._holding(start)})
        bar = mask_without(barred, self._vocab_size) if barred else None
        return _Tokens(self._codec.token_bytes, bar)

    def _holding(self, start: str) -> list[int]:
        """Tokens of whose text a start is a part."""
        plain = max(re.findall(r"[!-~]+", start), key=len, default="")  # as all vocabularies write it
        found = [token for name, token in self._tokenizer.get_vocab().items() if plain in name]
        text, codec = start.encode(), self._codec
        return [token for token in found if token < self._vocab_size and text in codec.token_bytes(token)]


def _barred_starts(thoughts: Thoughts) -> tuple[str, ...]:
    return tuple(block.start for block in thoughts.blocks) if thoughts.anywhere else ()
