"""One request inside the scheduler: its tokens, how far its KV is, and when it is finished."""

from __future__ import annotations

from enum import Enum

from ostinato.runtime.messages import FinishReason, GenerateRequest
from ostinato.runtime.scheduling.block_pool import PrefixKeys
from ostinato.runtime.scheduling.plan import ONE_PENDING, PENDING, PlanEntry


class Phase(Enum):
    """Where a sequence is. It is in exactly one queue of the scheduler, or in none (LEAVING, ENDED)."""

    WAITING = "waiting"
    PARKED = "parked"  # has come, and waits for its grammar before it may wait for a slot
    RUNNING = "running"  # has a slot
    LEAVING = "leaving"  # preempted while a step of it was in flight; waits again when that is settled
    ENDED = "ended"  # finished or aborted; blocks come back when no step of it is in flight


class Sequence:
    """State of one request. `tokens` = prompt + generated, appended to and never changed."""

    __slots__ = (
        "block_ids",
        "cached_tokens",
        "computed",
        "in_flight",
        "keys",
        "last",
        "last_step",
        "limit",
        "overlaps",
        "overtaken",
        "pending",
        "phase",
        "preempted",
        "priority",
        "prompt_rows",
        "prompt_tokens",
        "published",
        "rank",
        "request_id",
        "sampling",
        "scheduled",
        "started",
        "stop_ids",
        "tokens",
        "wants_prompt_rows",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        arrival: int,
        window: int,
        block_tokens: int,
        overlaps: bool = True,
    ) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.priority = request.priority
        self.rank = (request.priority, arrival)  # lower goes first; unique
        self.tokens = list(request.prompt_token_ids)
        self.prompt_tokens = len(self.tokens)
        self.limit = window - self.prompt_tokens  # most tokens to generate
        if request.sampling.max_tokens is not None:
            self.limit = min(self.limit, request.sampling.max_tokens)
        self.last = self.prompt_tokens + self.limit - 1  # tokens that are fed; the answer's last one never is
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        self.overlaps = overlaps  # a token may be fed before it is known
        self.wants_prompt_rows = request.sampling.prompt_logprobs is not None
        self.keys = PrefixKeys(self.tokens, block_tokens, request.cache_salt)
        self.phase = Phase.WAITING
        self.block_ids: tuple[int, ...] = ()
        self.computed = 0  # tokens whose KV is on the device for certain
        self.scheduled = 0  # the same, counting plans in flight
        self.pending = 0  # sampled tokens in flight
        self.in_flight = 0  # plans in flight with this sequence
        self.published = 0  # leading blocks offered to the prefix cache
        self.prompt_rows = 0  # rows of prompt log-probabilities planned so far
        self.cached_tokens = 0
        self.last_step = 0  # number of the newest plan with this sequence
        self.overtaken = 0  # requests admitted past it while it lacked blocks
        self.started = False  # has been admitted once
        self.preempted = False  # has lost its blocks once

    @property
    def todo(self) -> int:
        """Tokens that can be fed now."""
        known, last = len(self.tokens) + (self.pending if self.overlaps else 0), self.last
        return (known if known < last else last) - self.scheduled

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, without those in flight."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def needs_prompt_rows(self) -> bool:
        """Prompt log-probabilities are asked for and not all planned: every prompt token must be computed."""
        return self.wants_prompt_rows and self.prompt_rows < self.prompt_tokens - 1

    def lacking_blocks(self, block_tokens: int) -> int:
        """Blocks still to be given for the tokens known now."""
        return max(0, -(-len(self.tokens) // block_tokens) - len(self.block_ids))

    def plan(self, num_tokens: int, step: int) -> PlanEntry:
        """Feed the next `num_tokens` in plan `step`; the blocks for them are there."""
        if num_tokens == 1 and not self.wants_prompt_rows:
            return self._plan_one(step)
        start, known = self.scheduled, len(self.tokens)
        end = start + num_tokens
        ids = tuple(self.tokens[start:end])
        samples = end == known + self.pending
        first_row = num_tokens - samples
        if self.needs_prompt_rows:
            first_row = min(first_row, max(0, self.prompt_rows - start))
            self.prompt_rows = max(self.prompt_rows, min(end, self.prompt_tokens - 1))
        entry = PlanEntry(
            self.request_id,
            ids if end <= known else (*ids, PENDING),
            start,
            self.block_ids,
            samples,
            first_row,
            known + self.pending - self.prompt_tokens,
            self.prompt_tokens,
        )
        self.scheduled = end
        self.pending += samples
        self.in_flight += 1
        self.last_step = step
        return entry

    def _plan_one(self, step: int) -> PlanEntry:
        """`plan(1, step)` without rows of the prompt, made as fast as Python can: 256 of these are a step."""
        start, known, ahead = self.scheduled, len(self.tokens), self.pending
        samples = start + 1 == known + ahead
        self.scheduled = start + 1
        self.pending = ahead + samples
        self.in_flight += 1
        self.last_step = step
        entry = (
            self.request_id,
            ONE_PENDING if start >= known else (self.tokens[start],),
            start,
            self.block_ids,
            samples,
            1 - samples,
            known + ahead - self.prompt_tokens,
            self.prompt_tokens,
        )
        return tuple.__new__(PlanEntry, entry)  # a fifth of the time of PlanEntry(...)

    def take_back(self, entry: PlanEntry) -> None:
        """Undo the `plan` that gave this entry, the newest."""
        self.scheduled = entry.start
        self.pending -= entry.samples
        self.in_flight -= 1
        if entry.prompt_logit_rows:
            self.prompt_rows = entry.start + entry.prompt_logit_rows[0]

    def lose_blocks(self) -> None:
        """Forget the KV, keep the tokens: everything is computed again."""
        self.block_ids = ()
        self.computed = self.scheduled = self.published = 0

    def finish_reason(self, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Why the newest token ends the answer, and that token if it is an EOS or stop token.

        EOS and stop tokens do not count among the first `min_tokens` (the sampler masks them there).
        """
        sampling, token = self.sampling, self.tokens[-1]
        if self.num_generated > sampling.min_tokens and (
            token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos)
        ):
            return "stop", token
        return ("length", None) if self.num_generated >= self.limit else (None, None)
