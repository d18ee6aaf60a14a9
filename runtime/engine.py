"""The engine: requests in, token events out, one step at a time. It owns the KV memory.

    inbox -> scheduler -> plan -> backend (logits, sampling) -> scheduler -> events

On a GPU the loop is one step behind: a step is launched before the tokens of the one before are read.

One thread calls everything here except `inbox.put` and `inbox.close`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, Self

import torch

from ostinato.errors import RequestError
from ostinato.runtime.answer_rules import make_rules, read_rules
from ostinato.runtime.config import EngineConfig, resolve
from ostinato.runtime.context_window import context_window
from ostinato.runtime.engine_calls import EngineCalls
from ostinato.runtime.frames import Events, Message
from ostinato.runtime.inbox import Inbox
from ostinato.runtime.kv_memory import make_kv_memory
from ostinato.runtime.memory.block_copy import copy_blocks
from ostinato.runtime.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    Order,
    OwnFault,
    PoolRequest,
    TokenEvent,
    TokenLogprob,
)
from ostinato.runtime.profiler import Profiler
from ostinato.runtime.queue_times import QueueTimes
from ostinato.runtime.request_check import check_request, refusal_of, wrong_task
from ostinato.runtime.runner import Model
from ostinato.runtime.scheduling.plan import Outcome, Plan
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.sleep import Sleeper
from ostinato.runtime.step_backend import CpuBackend, LaunchedStep, StepBackend
from ostinato.runtime.step_room import NoRoomError, StepRoom

log = logging.getLogger(__name__)

STATS_S = 0.1  # least time between two snapshots while busy
REST_S = 0.05  # an engine that idles this long checks its books
_NO_LOGPROBS: Mapping[str, TokenLogprob] = {}
WAIT_FOR_MEMORY_S = 0.01  # nap when no request can run until KV memory has grown


class Outlet(Protocol):
    """Where the engine's news go."""

    def send(self, messages: Sequence[Message], /) -> None:
        """Take the news of one step; must not wait for whoever reads them."""

    def idle(self) -> None:
        """The engine has nothing to do: waiting for a slow reader is allowed now."""


class Engine:
    """A loaded model with its memory, queue and loop. As a context manager it frees the memory at the end."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Commit the initial KV memory. Raises ConfigError: no room, or settings and model disagree."""
        facts = model.facts
        config = resolve(config, model.device.type)
        self.inbox = inbox or Inbox()
        self._config = config
        self._clock = clock
        stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._memory, self._blocks, self._sizer = make_kv_memory(
            facts,
            config.kv,
            model.device,
            stream=None if stream is None else stream.cuda_stream,
            wake=self.inbox.wake,
            clock=clock,
        )
        try:
            window = context_window(facts, config, self._blocks.capacity * config.kv.block_tokens)
            self.info = EngineInfo(
                model=config.server.served_name or model.folder.name,
                vocab_size=facts.vocab_size,
                max_model_len=window,
                block_tokens=config.kv.block_tokens,
                eos_token_ids=facts.eos_token_ids,
                bos_token_id=facts.bos_token_id,
                dtype=facts.dtype,
                artifact=str(model.folder),
            )
            self._backend = self._make_backend(model, window, stream)
        except BaseException:
            self._sizer.close()
            raise
        self._in_flight: deque[LaunchedStep] = deque()
        self._queue_times = QueueTimes(clock)
        self._rules = make_rules(model.folder, facts, wake=self.inbox.wake, clock=clock)
        self._scheduler = Scheduler(
            self._blocks,
            config.scheduler,
            window,
            frozenset(facts.eos_token_ids),
            max_in_flight=self._backend.max_in_flight,
        )
        self._step_room = StepRoom(self._scheduler, clock)
        self._sleeper = Sleeper(model.weights, self._memory, self._sizer, self._scheduler)
        self._profiler = Profiler(
            config.profile, model.device, name_calls=model.name_calls, wake=self.inbox.wake
        )
        self._calls = EngineCalls(
            self._scheduler,
            self._sizer,
            self._sleeper,
            self._profiler,
            settle=self._settle_all,
            end=self._end,
            move=self._move_blocks,
            clock=clock,
        )
        self._stats_at = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the KV memory; safe to call twice. Live requests are dropped without an event."""
        if not self._memory.is_closed:
            self._profiler.close()
            self._rules.shut()
            try:
                self._backend.shut()  # it holds the planes
            finally:
                self._sizer.close()

    def _make_backend(self, model: Model, window: int, stream: torch.cuda.Stream | None) -> StepBackend:
        facts, planes = model.facts, self._memory.planes()
        if stream is not None:
            from ostinato.runtime.gpu.gpu_backend import GpuBackend  # needs what only a GPU machine has

            backend = GpuBackend(model, planes, self._config, window=window, stream=stream)
            with self._sizer.quiet(), torch.inference_mode():
                backend.warm_up()
            return backend
        return CpuBackend(
            model,
            planes,
            block_tokens=self._config.kv.block_tokens,
            vocab_size=facts.vocab_size,
            eos_token_ids=frozenset(facts.eos_token_ids),
        )

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work

    def serve(self, outlet: Outlet) -> None:
        """Run until the inbox is closed."""
        while not self.inbox.is_closed:
            news = self.step()
            if self._clock() - self._stats_at >= STATS_S:
                news.append(self.stats())
            if news:
                outlet.send(news)
            if not self._scheduler.has_work or self._sleeper.level:
                self._rest(outlet)

    def step(self) -> list[Message]:
        """One turn: admit, grow, plan, launch, then settle the oldest step while the device works."""
        self._profiler.tick()
        refusals, events = self._admit(self.inbox.drain())
        refusals += self._unpark()
        self._sizer.grow(self._scheduler.blocks_wanted())
        self._step_room.recover()
        if not self._in_flight:
            self._pause()
        must_wait = self._sizer.wants_quiet or self._backend.wants_pause or self._sleeper.level
        plan = None if must_wait else self._scheduler.next_plan(growth_pending=self._sizer.may_grow)
        events += [self._event(outcome) for outcome in self._scheduler.take_ended()]
        if plan is not None:
            events += self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._backend.max_in_flight):
            events += self._settle(self._in_flight.popleft())
        elif plan is None and self._scheduler.has_work and not events and not self._sleeper.level:
            self.inbox.wait(WAIT_FOR_MEMORY_S)
        return [*refusals, Events(events=tuple(events))] if events else [*refusals]

    def stats(self) -> EngineStats:
        """A snapshot of the books."""
        self._stats_at = self._clock()
        counters, blocks = self._scheduler.counters, self._blocks
        return EngineStats(
            steps=counters.steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            blocks_used=blocks.num_held,
            blocks_cached=blocks.num_cached,
            blocks_committed=blocks.committed,
            blocks_capacity=blocks.capacity,
            kv_bytes_committed=self._sizer.physical_bytes,
            graph_replays=self._backend.graph_replays,
            eager_steps=dict(self._backend.eager_steps()),
            asleep=self._sleeper.level,
        )

    def check(self) -> None:
        """Raise AssertionError or VmmError when blocks, queues and memory do not balance."""
        self._scheduler.check()
        live = self._scheduler.num_running + self._scheduler.num_waiting
        assert self._backend.num_requests == live, (
            f"{self._backend.num_requests} sampled requests, {live} live"
        )
        assert self._rules.num_requests <= live, "rules are kept of a request that has ended"
        self._sizer.check()

    def _admit(self, mail: Sequence[Order]) -> tuple[list[Message], list[TokenEvent]]:
        """Queue requests and cancel others, in the order in which they came."""
        refusals: list[Message] = []
        events: list[TokenEvent] = []
        for message in mail:
            if isinstance(message, PoolRequest):
                refusals.append(refusal_of(message.request_id, wrong_task("embed", self.info)))
                continue
            if not isinstance(message, GenerateRequest | Abort):
                done, settled = self._calls.answer(message)
                refusals.append(done)
                events += settled
                continue
            if isinstance(message, Abort):
                events += self._end(message.request_ids)
                continue
            try:
                check_request(message, self.info)
                rules = read_rules(message)
                self._scheduler.add(message, parked=not rules.are_none)
                self._backend.open(message, self._scheduler.tokens(message.request_id))
                if not rules.are_none:
                    self._rules.start(message, rules)
                self._queue_times.arrived(message.request_id)
            except RequestError as error:
                refusals.append(refusal_of(message.request_id, error))
        return refusals, events

    def _unpark(self) -> list[Message]:
        """Requests whose grammar is compiled may run; those whose grammar is wrong are refused."""
        refusals: list[Message] = []
        for name, error in self._rules.take_ready():
            if error is None:
                self._scheduler.overlap({name: self._rules.runs_ahead(name)})
                self._scheduler.unpark(name)
                continue
            self._scheduler.abort(name)
            self._close(name)
            refusals.append(refusal_of(name, error))
        return refusals

    def _close(self, name: str) -> None:
        self._backend.close(name)
        self._queue_times.take(name)
        self._rules.close(name)

    def _end(self, names: Iterable[str]) -> list[TokenEvent]:
        """Cancel those of these requests that are live."""
        ended = [name for name in names if self._scheduler.abort(name)]
        for name in ended:
            self._close(name)
        return [TokenEvent(request_id=name, finish_reason="abort") for name in ended]

    def _launch(self, plan: Plan) -> list[TokenEvent]:
        """Give a plan to the device. One that raises ends its own requests only."""
        self._queue_times.planned(plan)
        try:
            with self._profiler.step(plan.step, len(plan.entries), plan.num_tokens):
                self._in_flight.append(self._backend.launch(plan, self._rules.limits(plan)))
        except Exception as error:  # a border: whatever a model raises, the other requests go on
            again = isinstance(error, NoRoomError) and self._step_room.take_back(plan, error)
            return self._settle_all() + ([] if again else self._failed(plan, error))
        return []

    def _settle_all(self) -> list[TokenEvent]:
        """Every step in flight, oldest first: plans are settled in order."""
        events: list[TokenEvent] = []
        while self._in_flight:
            events += self._settle(self._in_flight.popleft())
        return events

    def _settle(self, step: LaunchedStep) -> list[TokenEvent]:
        """Wait for the tokens of a step and tell the scheduler."""
        try:
            batch = step.result()
        except Exception as error:  # a border, as in `_launch`
            return self._failed(step.plan, error)
        failed, finished = batch.errors, frozenset[str]()
        if self._rules.num_requests:
            names = self._scheduler.awaited()
            finished, lost, ahead = self._rules.take(
                {name: batch.tokens[name] for name in names & batch.tokens.keys()}
            )
            failed = {**failed, **lost}
            self._scheduler.overlap(ahead)
        outcomes = self._scheduler.complete(step.plan, batch.tokens, failed, finished=finished)
        logprobs, event = batch.logprobs, self._event
        if logprobs:
            return [event(outcome, logprobs) for outcome in outcomes]
        return [
            # in the middle of an answer there is a token and no other news
            event(outcome)
            if outcome.finish_reason is not None or outcome.index == 0
            else TokenEvent(outcome.request_id, (outcome.token_id,))  # type: ignore[arg-type]  # see above
            for outcome in outcomes
        ]

    def _failed(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        log.error(
            "step %d failed; its %d requests end with an error", plan.step, len(plan.entries), exc_info=error
        )
        self._backend.check()  # on a device that has failed no later step would end: raises out of `serve`
        reason = f"the step failed: {type(error).__name__}: {error}"
        failed = {entry.request_id: reason for entry in plan.entries}
        events = [self._event(outcome) for outcome in self._scheduler.complete(plan, {}, failed)]
        self.check()  # books that do not balance are fatal: this raises out of `serve`
        return events

    def _event(self, outcome: Outcome, logprobs: Mapping[str, TokenLogprob] = _NO_LOGPROBS) -> TokenEvent:
        name, is_first = outcome.request_id, outcome.index == 0
        has_token = outcome.token_id is not None
        event = TokenEvent(
            request_id=name,
            token_ids=() if outcome.token_id is None else (outcome.token_id,),
            logprobs=(logprobs[name],) if has_token and name in logprobs else (),
            prompt_logprobs=self._backend.prompt_logprobs(name) if is_first and has_token else None,
            finish_reason=outcome.finish_reason,
            stop_token_id=outcome.stop_token_id,
            cached_tokens=outcome.cached_tokens if is_first else 0,
            error=outcome.error,
            refused=isinstance(outcome.error, OwnFault),
            queued_s=self._queue_times.take(name) if is_first else 0.0,
        )
        if outcome.finish_reason is not None:
            self._close(name)
        return event

    def _move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move KV to other blocks, on the device and in the block tables. No step is in flight."""
        copy_blocks(self._memory.planes(), moves)
        self._scheduler.move_blocks(moves)

    def _pause(self) -> None:
        """Do what waits for this moment. No step is in flight."""
        if self._sizer.wants_quiet:
            self._sizer.cut(self._move_blocks)
        if self._backend.wants_pause and not self._sleeper.level:
            self._idle()

    def _idle(self) -> bool:
        """A little of what was put off at start, such as capturing a graph; False: nothing is left."""
        with self._sizer.quiet():
            return self._backend.idle()

    def _rest(self, outlet: Outlet) -> None:
        """Say so, check the books, give memory back after a while, sleep until there is mail."""
        outlet.send([self.stats()])
        outlet.idle()
        if self._sleeper.level:
            self.inbox.wait(None)
            return
        while self._idle():
            if self.inbox.wait(0):
                return
        if self.inbox.wait(REST_S):
            return
        self.check()
        shrink_s = self._config.kv.idle_shrink_s
        if shrink_s and not self.inbox.wait(max(0.0, shrink_s - REST_S)):
            self._sizer.shrink()
            outlet.send([self.stats()])
        self.inbox.wait(None)
