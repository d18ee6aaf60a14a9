"""Which sequences have a slot and KV blocks: admission, block supply, preemption.

Rank. Sequences are ordered by (priority, arrival); a lower priority value goes first, strictly: a request may
starve under a steady load of lower values. A preempted sequence keeps its arrival, so no newcomer of the same
priority passes it.

Admission gives a slot and sets blocks aside for all tokens known (prompt, or prompt and answer so far), plus
one spare block per running sequence. A request that lacks blocks lets later ones pass, at most MAX_OVERTAKEN
of them; after that nobody ranked behind it is admitted before it, so it waits only for running ones to end.
At most LOOK_AHEAD requests that lack blocks are passed over in one step.

Preemption frees all blocks of a sequence; it waits again and computes its tokens anew (or finds them in the
prefix cache). It strikes the last in rank, never one that is already in the plan, and happens
    - when a sequence needs a block and none is left, at the cost of those ranked behind it. Where that does
      not help, it pauses and keeps its blocks;
    - when a waiting request lacks a slot or blocks, at the cost of those of a strictly higher priority value.
      For a slot one is enough, so there are no more such preemptions than arrivals of a better priority.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.runtime.scheduling.block_pool import BlockPool
from ostinato.runtime.scheduling.ranked_queue import RankedQueue
from ostinato.runtime.scheduling.sequence import Phase, Sequence

MAX_OVERTAKEN = 64  # requests; enough to keep a busy pool full, a few seconds of short requests
LOOK_AHEAD = 16  # requests; bounds the prefix look-ups of one step


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start. Prompt and prefix tokens of a request count once, at its first admission."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found


class Slots:
    """The waiting and the running queue over one block pool.

    A sequence that leaves while a plan in flight has it is `unsettled`: its blocks come back by `settle`.
    """

    def __init__(self, pool: BlockPool, max_running: int, counters: SchedulerCounters) -> None:
        self.pool = pool
        self.max_running = max_running
        self.waiting = RankedQueue()
        self.running = RankedQueue()
        self.unsettled = 0
        self._counters = counters

    @property
    def num_open(self) -> int:
        """Slots without a sequence."""
        return self.max_running - len(self.running)

    def blocks_wanted(self) -> int:
        """Blocks to commit so that the running sequences and those next in line find free ones."""
        size, wanted = self.pool.block_tokens, len(self.running)
        for sequence in self.running:
            if len(sequence.tokens) > len(sequence.block_ids) * size:
                wanted += sequence.lacking_blocks(size)
        for index in range(min(len(self.waiting), self.num_open, LOOK_AHEAD)):
            sequence = self.waiting[index]
            wanted += sequence.lacking_blocks(size) - len(self._find_prefix(sequence)) + 1
        return max(0, min(wanted - self.pool.num_free, self.pool.capacity - self.pool.committed))

    def admit(self) -> None:
        """Move waiting sequences to slots, by rank, as far as slots and blocks go."""
        first_blocked: Sequence | None = None
        index = misses = 0
        promised = -1
        while index < len(self.waiting):
            sequence = self.waiting[index]
            if self.num_open < 1 and self.running[len(self.running) - 1].priority <= sequence.priority:
                return
            if promised < 0:
                promised = sum(s.lacking_blocks(self.pool.block_tokens) for s in self.running)
            preemptions = self._counters.preemptions
            if self._try_admit(sequence, promised):
                promised += sequence.lacking_blocks(self.pool.block_tokens)
                if first_blocked is not None:
                    first_blocked.overtaken += 1
            else:
                first_blocked = first_blocked or sequence
                index += 1
                misses += 1
            if self._counters.preemptions != preemptions:
                promised = -1
            if first_blocked and (first_blocked.overtaken >= MAX_OVERTAKEN or misses >= LOOK_AHEAD):
                return

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Take published blocks that continue what the sequence has, instead of computing them."""
        found = self._find_prefix(sequence)
        if not found:
            return
        self.pool.hold(found)
        sequence.block_ids += tuple(found)
        sequence.published = len(sequence.block_ids)
        sequence.computed = sequence.scheduled = sequence.published * self.pool.block_tokens
        if not sequence.preempted:
            sequence.cached_tokens += len(found) * self.pool.block_tokens
            self._counters.prefix_hits += len(found) * self.pool.block_tokens

    def secure(self, sequence: Sequence, tokens: int, reserve: int) -> int:
        """Give blocks for up to `tokens` more tokens, but leave `reserve`; return how many tokens fit."""
        pool = self.pool
        room = len(sequence.block_ids) * pool.block_tokens - sequence.scheduled
        if room < tokens:
            spare = pool.available - reserve
            if room == 0 and spare < 1 and self._make_room(sequence, 1 - spare):
                spare = pool.available - reserve
            count = min(-(-(tokens - room) // pool.block_tokens), max(0, spare))
            if count:
                sequence.block_ids += tuple(pool.allocate(count))
                room += count * pool.block_tokens
        return min(tokens, room)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in any phase."""
        if sequence.phase is Phase.LEAVING:
            sequence.phase = Phase.ENDED  # its blocks are on their way
            return
        (self.waiting if sequence.phase is Phase.WAITING else self.running).remove(sequence)
        self._leave(sequence, Phase.ENDED)

    def preempt_all(self) -> None:
        """Back to the queue with everybody; blocks come back now unless a plan in flight has them."""
        for sequence in [*self.running]:
            self._preempt(sequence)

    def settle(self, sequence: Sequence) -> None:
        """The last plan in flight with a LEAVING or ENDED sequence is settled."""
        self.unsettled -= 1
        self._return_blocks(sequence)

    def _try_admit(self, sequence: Sequence, promised: int) -> bool:
        pool = self.pool
        known = self._find_prefix(sequence)
        need = sequence.lacking_blocks(pool.block_tokens) - sum(pool.references(block) > 0 for block in known)
        missing = need - (pool.available - promised - len(self.running))
        if self.num_open < 1 or missing > 0:
            victims = self._victims(
                missing, lambda victim: victim.priority > sequence.priority, unpromise=True
            )
            if not victims or self.unsettled:
                return False
            for victim in victims:
                self._preempt(victim)
            if self.unsettled:
                return False  # the blocks come with the step in flight
        self.waiting.remove(sequence)
        self.running.add(sequence)
        sequence.phase = Phase.RUNNING
        sequence.overtaken = 0
        if not sequence.started:
            sequence.started = True
            self._counters.prompt_tokens += sequence.prompt_tokens
            if pool.prefix_cache and not sequence.needs_prompt_rows:
                self._counters.prefix_queries += sequence.prompt_tokens
        self.reuse_prefix(sequence)
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        pool, first = self.pool, len(sequence.block_ids)
        found: list[int] = []
        if not pool.prefix_cache or sequence.needs_prompt_rows or sequence.in_flight:
            return found
        if sequence.scheduled != first * pool.block_tokens:
            return found
        for index in range(first, (len(sequence.tokens) - 1) // pool.block_tokens):
            block = pool.lookup(sequence.keys[index])
            if block is None:
                break
            found.append(block)
        return found

    def _make_room(self, sequence: Sequence, missing: int) -> bool:
        """Preempt sequences ranked behind so that `missing` blocks come free; False if that cannot be now."""
        planning = self._counters.steps + 1
        victims = self._victims(
            missing,
            lambda victim: victim.rank > sequence.rank,
            spared=lambda victim: not victim.block_ids or victim.last_step == planning,
        )
        if not victims or self.unsettled:
            return False
        for victim in victims:
            self._preempt(victim)
        return not self.unsettled

    def _victims(
        self,
        missing: int,
        behind: Callable[[Sequence], bool],
        *,
        spared: Callable[[Sequence], bool] = lambda _: False,
        unpromise: bool = False,
    ) -> list[Sequence]:
        """The fewest sequences from the tail of the running queue that free `missing` blocks and a slot.

        Empty if even all together do not. `unpromise`: what was set aside for a victim counts as freed too.
        """
        victims: list[Sequence] = []
        holders: dict[int, int] = {}
        for victim in reversed(self.running):
            if not behind(victim):
                break
            if spared(victim):
                continue
            victims.append(victim)
            for block in victim.block_ids:
                holders[block] = holders.get(block, 0) + 1
                missing -= holders[block] == self.pool.references(block)
            if unpromise:
                missing -= victim.lacking_blocks(self.pool.block_tokens) + 1
            if missing <= 0:
                return victims
        return []

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        sequence.preempted = True
        self.running.remove(sequence)
        self._leave(sequence, Phase.LEAVING)

    def _leave(self, sequence: Sequence, phase: Phase) -> None:
        sequence.phase = phase
        if sequence.in_flight:
            self.unsettled += 1
        else:
            self._return_blocks(sequence)

    def _return_blocks(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_ids)
        sequence.lose_blocks()
        if sequence.phase is Phase.LEAVING:
            sequence.phase = Phase.WAITING
            self.waiting.add(sequence)
