"""What the next step computes: continuous batching with chunked prefill. Pure Python, no torch.

A step feeds one token to every decoding sequence first. Should these and the prefills not fit into
`max_step_tokens`, an eighth is kept for prefills and the decodes take turns. What is left is shared by the
prefills: `prefill_share.py`. Rank, admission and preemption: `slots.py`.

A prompt with `prompt_logprobs` is computed in full: it does not read the prefix cache, though it fills it.

Parking. A request with rules for its tokens is parked until `unpark`: it holds neither a slot nor blocks, its
rank stays, and nobody waits for it. Where its next token cannot be drawn before the last one is known (a
grammar says what may follow), it is in at most one plan that samples; all others go on overlapping.

Overlap. `next_plan` may be called before `complete` of the plan before, up to `max_in_flight` plans. What
holds then: plans are settled in order; blocks of a sequence come back only when no plan in flight has it; a
block is published only when the plan that filled it is settled; a token sampled for a sequence that has
ended meanwhile is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from collections.abc import Sequence as Tokens

from ostinato.errors import InvalidRequest, Overloaded
from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import GenerateRequest
from ostinato.runtime.prompt_room import room_left
from ostinato.runtime.scheduling.block_pool import BlockPool
from ostinato.runtime.scheduling.plan import Outcome, Plan, PlanEntry
from ostinato.runtime.scheduling.prefill_share import share_tokens
from ostinato.runtime.scheduling.sequence import Phase, Sequence
from ostinato.runtime.scheduling.slots import SchedulerCounters, Slots

_NOBODY: frozenset[str] = frozenset()
PREFILL_SHARE = 8  # one part in eight of a step is kept for prefills when decodes would fill it


class Scheduler:
    """Requests in, plans out, outcomes back. One thread; the loop is

    `add` / `abort` -> grow the pool by `blocks_wanted` -> `next_plan` -> (run) -> `complete`, `take_ended`.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        *,
        max_in_flight: int = 1,
    ) -> None:
        self.pool = pool
        self.config = config
        self.step_tokens = config.max_step_tokens  # of the next plan, at most
        self.window = min(max_model_len, pool.capacity * pool.block_tokens)  # tokens, prompt and answer
        self.counters = SchedulerCounters()
        self._eos_token_ids = eos_token_ids
        self._max_in_flight = max_in_flight
        self._arrivals = 0
        self._live: dict[str, Sequence] = {}
        self._slots = Slots(pool, config.max_running, self.counters)
        self._parked: set[Sequence] = set()
        self._in_flight: deque[tuple[Plan, list[Sequence]]] = deque()
        self._ended: list[Outcome] = []

    @property
    def has_work(self) -> bool:
        """Something waits, runs or is in flight."""
        return bool(self._live or self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._slots.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, preempted ones too."""
        return len(self._live) - len(self._slots.running)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """All live requests, in the order of their arrival."""
        return tuple(self._live)

    def tokens(self, request_id: str) -> Tokens[int]:
        """Prompt and generated tokens of a live request: the live list itself, so do not change it."""
        return self._live[request_id].tokens

    def add(self, request: GenerateRequest, *, parked: bool = False) -> None:
        """Queue a request. Raises ContextTooLong, InvalidRequest (empty prompt, id in use) or Overloaded.

        A prompt must leave room for one token. `max_tokens` beyond the window is not an error: the answer
        ends with `length` when the window is full. Overloaded: `max_waiting` requests wait besides those for
        which there is a slot. `parked`: it has rules, and is not to run before `unpark`.
        """
        length = len(request.prompt_token_ids)
        if length == 0:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
        room_left(length, self.window, param="prompt")
        if request.request_id in self._live:
            raise InvalidRequest(
                f"request_id={request.request_id!r}: a request with this id is running; choose another",
                param="request_id",
            )
        waiting, most = len(self._slots.waiting) + len(self._parked), self.config.max_waiting
        if waiting >= most + self._slots.num_open:
            raise Overloaded(
                f"{waiting} requests wait, scheduler.max_waiting={most}: try again later or raise it"
            )
        self._arrivals += 1
        sequence = Sequence(
            request,
            arrival=self._arrivals,
            window=self.window,
            block_tokens=self.pool.block_tokens,
            overlaps=not parked,
        )
        self._live[sequence.request_id] = sequence
        if parked:
            sequence.phase = Phase.PARKED
            self._parked.add(sequence)
        else:
            self._slots.waiting.add(sequence)

    def overlap(self, requests: Mapping[str, bool]) -> None:
        """Whether the next token of live requests may be drawn before the last one is known."""
        for name, overlaps in requests.items():
            self._live[name].overlaps = overlaps

    def unpark(self, request_id: str) -> None:
        """A parked request may run now."""
        sequence = self._live[request_id]
        self._parked.remove(sequence)
        sequence.phase = Phase.WAITING
        self._slots.waiting.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if it is not live (unknown, finished, aborted before).

        The caller tells the client. Blocks come back now, or when the step in flight is settled; the id can
        be used again at once.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def blocks_wanted(self) -> int:
        """Blocks to commit beyond those committed, ahead of need; 0 if none. Call before `next_plan`.

        Counted against free blocks alone: growing is better than evicting, evicting better than preempting.
        Asks for what running sequences and those next in line lack, and one more block for each.
        """
        return self._slots.blocks_wanted()

    def next_plan(self, *, growth_pending: bool = False) -> Plan | None:
        """The next step, or None: nothing to do, or `max_in_flight` plans are out.

        When not even one sequence can go on for lack of blocks and nothing is in flight, the first in rank is
        ended with an error (`take_ended`), unless `growth_pending` says that more blocks may come.
        """
        if len(self._in_flight) >= self._max_in_flight:
            return None
        self._slots.admit()
        plan = self._build()
        stuck = len(self._live) > len(self._parked)
        while plan is None and stuck and not self._in_flight and not growth_pending:
            self._fail_stuck()
            self._slots.admit()
            plan = self._build()
            stuck = len(self._live) > len(self._parked)
        return plan

    def complete(
        self,
        plan: Plan,
        sampled: Mapping[str, int],
        failed: Mapping[str, str] | None = None,
        *,
        finished: Set[str] = _NOBODY,
    ) -> list[Outcome]:
        """Settle the oldest plan in flight: its KV is written. Returns news, in plan order.

        `sampled` has a token for each entry that samples, except those in `failed` (request id -> reason: NaN
        logits, a broken step), which end with an error and leave nothing of this step in the prefix cache.
        Answers of `finished` are complete with their token. Ids of requests that were aborted meanwhile are
        ignored.
        """
        failed = failed or {}
        assert self._in_flight, "complete() without a plan in flight"
        assert self._in_flight[0][0] is plan, "plans are settled in the order in which they were made"
        _, sequences = self._in_flight.popleft()
        outcomes: list[Outcome] = []
        ended, leaving, size = Phase.ENDED, Phase.LEAVING, self.pool.block_tokens
        for entry, sequence in zip(plan.entries, sequences, strict=True):
            sequence.in_flight -= 1
            sequence.pending -= entry.samples
            phase = sequence.phase
            has_left = phase is leaving or phase is ended
            if phase is not ended:
                name = sequence.request_id
                if name in failed:
                    self._end(sequence)
                    outcomes.append(_error(sequence, failed[name]))
                else:
                    sequence.computed += len(entry.token_ids)
                    if sequence.computed >= (sequence.published + 1) * size:
                        self._publish(sequence)
                    if entry.samples:
                        outcomes.append(self._append(sequence, sampled[name], name in finished))
            if has_left and sequence.in_flight == 0:
                self._slots.settle(sequence)
        return outcomes

    def take_back(self, plan: Plan) -> None:
        """The newest plan does not run after all: what it had is to be planned again."""
        assert self._in_flight, "take_back() without a plan in flight"
        assert self._in_flight[-1][0] is plan, "only the newest plan can be taken back"
        _, sequences = self._in_flight.pop()
        for entry, sequence in zip(plan.entries, sequences, strict=True):
            sequence.take_back(entry)
            if sequence.in_flight == 0 and sequence.phase in (Phase.LEAVING, Phase.ENDED):
                self._slots.settle(sequence)

    def awaited(self) -> set[str]:
        """Live requests of the oldest plan in flight: `complete` will use what is sampled for these."""
        _, sequences = self._in_flight[0]
        return {sequence.request_id for sequence in sequences if sequence.phase is not Phase.ENDED}

    @property
    def num_in_flight(self) -> int:
        """Plans made and not settled."""
        return len(self._in_flight)

    def preempt_all(self) -> None:
        """Every running sequence gives its blocks back and waits again. Nothing may be in flight."""
        assert not self._in_flight, "sequences are preempted under a plan in flight"
        self._slots.preempt_all()

    def move_blocks(self, moves: Tokens[tuple[int, int]]) -> None:
        """KV of block `from` lies in block `to` now: block tables follow. Nothing may be in flight."""
        assert not self._in_flight, "blocks are moved under a plan in flight"
        place = dict(moves)
        for sequence in self._live.values():
            if not place.keys().isdisjoint(sequence.block_ids):
                sequence.block_ids = tuple(place.get(block, block) for block in sequence.block_ids)

    def take_ended(self) -> list[Outcome]:
        """Requests that `next_plan` had to end since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raise AssertionError when the books do not balance. Cost: linear in blocks."""
        self.pool.check()
        flying = [sequence for _, sequences in self._in_flight for sequence in sequences]
        holders: dict[int, int] = {}
        for sequence in {*self._live.values(), *flying}:
            for block in sequence.block_ids:
                holders[block] = holders.get(block, 0) + 1
        books = {block: n for block in range(self.pool.committed) if (n := self.pool.references(block))}
        assert holders == books, "blocks held by sequences and by the pool differ"
        waiting, running = set(self._slots.waiting), set(self._slots.running)
        assert len(running) <= self.config.max_running, "more sequences run than there are slots"
        assert len(waiting) == len(self._slots.waiting), "a request waits twice"
        assert len(running) == len(self._slots.running), "a request has two slots"
        parked, size = self._parked, self.pool.block_tokens
        for sequence in {*self._live.values(), *flying, *waiting, *running, *parked}:
            done, given = sequence.computed, len(sequence.block_ids) * size
            assert sequence.published * size <= done <= sequence.scheduled <= given, (
                "progress is out of order"
            )
            is_live = self._live.get(sequence.request_id) is sequence
            assert is_live == (sequence.phase is not Phase.ENDED), "an ended request is live"
            assert (sequence.phase is Phase.WAITING) == (sequence in waiting), "a request is in a wrong queue"
            assert (sequence.phase is Phase.RUNNING) == (sequence in running), "a request is in a wrong queue"
            assert (sequence.phase is Phase.PARKED) == (sequence in parked), "a request is in a wrong queue"

    def _build(self) -> Plan | None:
        step = self.counters.steps + 1
        decodes: list[tuple[Sequence, int]] = []  # with the blocks that better-ranked prefills still lack
        prefills: list[Sequence] = []
        promised = 0
        for sequence in self._slots.running:
            todo = sequence.todo
            if todo == 1:
                decodes.append((sequence, promised))
            elif todo > 1:
                prefills.append(sequence)
                promised += sequence.lacking_blocks(self.pool.block_tokens)
        budget = self.step_tokens
        room = budget - (max(1, budget // PREFILL_SHARE) if prefills and budget > 1 else 0)
        is_eighth = step % PREFILL_SHARE == 0
        if budget == 1 and prefills and is_eighth and self._slots.secure(prefills[0], 1, 0):
            room = 0  # of steps of one token prefills have an eighth
        if len(decodes) > room:
            turns = sorted(decodes, key=lambda decode: decode[0].last_step)
            # those whose turn it is, by rank; then, in place of those that lack a block, the next in turn
            decodes = sorted(turns[:room], key=lambda decode: decode[0].rank) + turns[room:]
        entries: list[PlanEntry] = []
        sequences: list[Sequence] = []
        running, size = Phase.RUNNING, self.pool.block_tokens
        for sequence, reserve in decodes:
            if len(entries) == room:
                break
            if sequence.phase is not running:
                continue
            has_room = len(sequence.block_ids) * size > sequence.scheduled
            if has_room or self._slots.secure(sequence, 1, reserve):
                entries.append(sequence.plan(1, step))
                sequences.append(sequence)
        num_tokens = len(entries)
        shares = share_tokens(self._slots, prefills, budget - num_tokens, step, block_tokens=size)
        for sequence, tokens in shares.items():
            entries.append(sequence.plan(tokens, step))
            sequences.append(sequence)
            num_tokens += tokens
        if not entries:
            return None
        self.counters.steps = step
        plan = Plan(step, tuple(entries), num_tokens)
        self._in_flight.append((plan, sequences))
        return plan

    def _publish(self, sequence: Sequence) -> None:
        if self.pool.prefix_cache:
            for index in range(sequence.published, sequence.computed // self.pool.block_tokens):
                self.pool.publish(sequence.block_ids[index], sequence.keys[index])
                sequence.published = index + 1

    def _append(self, sequence: Sequence, token: int, is_finished: bool) -> Outcome:
        tokens = sequence.tokens
        tokens.append(token)
        self.counters.generated_tokens += 1
        index = len(tokens) - sequence.prompt_tokens - 1
        reason, stop_token = None, None
        if index + 1 >= sequence.limit or token in self._eos_token_ids or token in sequence.stop_ids:
            reason, stop_token = sequence.finish_reason(self._eos_token_ids)
        if is_finished and stop_token is None:
            reason = "stop"
        if reason is not None:
            self._end(sequence)
        outcome = (sequence.request_id, token, index, reason, stop_token, sequence.cached_tokens, None)
        return tuple.__new__(Outcome, outcome)  # as in Sequence._plan_one

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.request_id]
        if sequence.phase is Phase.PARKED:
            sequence.phase = Phase.ENDED
            self._parked.remove(sequence)
        else:
            self._slots.remove(sequence)

    def _fail_stuck(self) -> None:
        pool, slots = self.pool, self._slots
        sequence = slots.running[0] if len(slots.running) else slots.waiting[0]
        self._end(sequence)
        blocks = -(-(len(sequence.tokens) + 1) // pool.block_tokens)
        self._ended.append(
            _error(
                sequence,
                f"KV memory is full: {len(sequence.tokens)} tokens and the next need {blocks} blocks of "
                f"{pool.block_tokens} tokens, {pool.committed} are committed and no more could be: shorten "
                "the request, raise kv.max_gib or lower kv.headroom_gib",
            )
        )


def _error(sequence: Sequence, reason: str) -> Outcome:
    return Outcome(
        sequence.request_id,
        None,
        sequence.num_generated,
        finish_reason="error",
        cached_tokens=sequence.cached_tokens,
        error=reason,
    )
