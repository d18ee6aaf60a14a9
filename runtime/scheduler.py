"""Who runs in the next step: continuous batching over one block pool. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import GenerateRequest
from ostinato.runtime.plan import Outcome, Plan


class Scheduler:
    """Signatures first; see the next commit."""

    def __init__(
        self,
        pool,
        config: SchedulerConfig,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        *,
        max_in_flight: int = 1,
    ) -> None: ...

    def add(self, request: GenerateRequest) -> None:
        """Raises ContextTooLong, InvalidRequest (empty prompt, id in use), Overloaded."""

    def abort(self, request_id: str) -> bool:
        """True if it was live: the caller sends the `abort` event. Blocks come back now, or with the step in flight."""

    def blocks_wanted(self) -> int:
        """Blocks to commit beyond pool.committed, ahead of need (0: none). Call between steps; then pool.grow_to(n)."""

    def next_plan(self, *, growth_pending: bool = False) -> Plan | None:
        """The next step. `growth_pending`: blocks asked for may still come, so do not fail a request that only waits for them."""

    def complete(
        self, plan: Plan, sampled: Mapping[str, int], failed: Mapping[str, str] | None = None
    ) -> list[Outcome]:
        """Settle the oldest plan in flight. `failed`: request id -> error text (NaN logits, runner failure)."""

    def take_ended(self) -> list[Outcome]:
        """Requests that ended outside a step (KV memory too small and growth refused); call after next_plan."""

    def tokens(self, request_id: str) -> Sequence[int]:
        """Prompt + generated tokens of a live request: the live list, not a copy; do not change it."""

    # has_work: bool; num_running, num_waiting: int; counters: SchedulerCounters(steps, preemptions, prompt_tokens,
    # generated_tokens, prefix_queries, prefix_hits)
