"""The grammars of an engine's requests: compiled aside, followed token by token.

`start` hands a grammar to a small pool of threads, while the scheduler keeps the request parked; `take_ready`
says which may run and which are refused. Compiling is done in the engine's process, since a matcher lives
where the tokens are drawn, and off its thread, since a large grammar takes as long as several steps; only the
GIL is shared, and llguidance lets go of it.

All but the compiling runs on the engine's thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.grammar_compiler import BadGrammar, GrammarCompiler
from ostinato.runtime.grammar.grammar_spec import GrammarSpec, grammar_param
from ostinato.runtime.grammar.grammar_state import GrammarState, Mask
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.scheduling.plan import Plan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from ostinato.graph.facts import ModelFacts

log = logging.getLogger(__name__)

THREADS = 2  # compiles at once; more would only take cores from the steps
COMPILE_S = 10.0  # a request whose grammar takes longer, the queue for a thread included, is refused
_TOGETHER = 8  # masks from which on several threads compute them: handing over costs as much as a mask
_MASK_THREADS = 8
NO_MASKS: Mapping[str, Mask] = {}


class Verdict(NamedTuple):
    """What new tokens mean: requests whose grammar is complete, and those that it lost, with the reason."""

    ended: frozenset[str]
    failed: Mapping[str, str]


NOTHING = Verdict(frozenset(), {})


@dataclass(slots=True)
class _Waiting:
    spec: GrammarSpec
    sampling: SamplingParams
    param: str
    since: float


class RequestGrammars:
    """From `start` to `close`, one grammar per request that has one."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        wake: Callable[[], None],
        clock: Callable[[], float],
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """`wake` is called from another thread when something is ready."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._wake = wake
        self._clock = clock
        self._pool = pool
        self._lock = threading.Lock()
        self._jobs: dict[GrammarSpec, Future[LLMatcher]] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._states: dict[str, GrammarState] = {}
        self._executor: LLExecutor | None = None

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """Requests that have a grammar, compiled or not."""
        return len(self._waiting) + len(self._states)

    def start(self, request: GenerateRequest, spec: GrammarSpec) -> None:
        """Begin to compile what `read_grammar` gave."""
        param = grammar_param(request.sampling)
        self._waiting[request.request_id] = _Waiting(spec, request.sampling, param, self._clock())
        if spec not in self._jobs and self._compiler.find(spec) is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, "grammar", initializer=_use_all_cores)
            job = self._jobs[spec] = self._pool.submit(self._compiler.compile, spec)
            job.add_done_callback(lambda _: self._wake())

    def take_ready(self) -> list[tuple[str, InvalidRequest | None]]:
        """Requests that need not be parked any longer; those with an error are to be refused."""
        if not self._waiting:
            return []
        ready: list[tuple[str, InvalidRequest | None]] = []
        now = self._clock()
        for name, waiting in [*self._waiting.items()]:
            job = self._jobs.get(waiting.spec)
            if job is not None and not job.done():
                if now - waiting.since <= COMPILE_S:
                    continue
                error: InvalidRequest | None = InvalidRequest(
                    f"{waiting.param}: the grammar was not compiled in {COMPILE_S:g} s; make it simpler, or "
                    "try again when the server has less to do",
                    param=waiting.param,
                )
            else:
                error = self._begin(name, waiting)
            del self._waiting[name]
            ready.append((name, error))
        for spec in [spec for spec, job in self._jobs.items() if job.done()]:
            del self._jobs[spec]
        return ready

    def close(self, request_id: str) -> None:
        """A request has ended, in whatever state; unknown ids are ignored."""
        self._states.pop(request_id, None)
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and all(other.spec != waiting.spec for other in self._waiting.values()):
            job = self._jobs.get(waiting.spec)
            if job is not None and job.cancel():  # it had not begun
                del self._jobs[waiting.spec]

    def masks(self, plan: Plan) -> Mapping[str, Mask]:
        """Masks of the tokens that a plan samples, by request; valid until the plan is settled."""
        if not self._states:
            return NO_MASKS
        masks = {}
        for entry in plan.entries:
            if entry.samples and (state := self._states.get(entry.request_id)) and state.is_active:
                masks[entry.request_id] = state.mask
        return masks

    def take(self, tokens: Mapping[str, int]) -> Verdict:
        """Answers go on with these tokens."""
        if not self._states:
            return NOTHING
        states = self._states
        mine = [(name, states[name]) for name in tokens if name in states]
        fresh = [state for name, state in mine if state.take(tokens[name])]
        self._refresh(fresh)
        return Verdict(
            frozenset(name for name, state in mine if state.ended),
            {name: state.error for name, state in mine if state.error is not None},
        )

    def shut(self) -> None:
        """Stop the threads; what they are doing is finished first."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, name: str, waiting: _Waiting) -> InvalidRequest | None:
        """Give a request the matcher that is compiled now."""
        param, spec = waiting.param, waiting.spec
        try:
            matcher = self._compiler.find(spec)
            if matcher is None:  # it failed; or it was compiled, and dropped from what is kept
                job = self._jobs.get(spec)
                matcher = (self._compiler.compile(spec) if job is None else job.result()).deep_copy()
        except BadGrammar as error:
            return InvalidRequest(f"{param}: {error}", param=param)
        except Exception as error:  # a border: a fault of the library ends this request only
            log.exception("a grammar could not be compiled")
            return InvalidRequest(f"{param}: not compiled: {type(error).__name__}: {error}", param=param)
        state = GrammarState(
            matcher,
            waiting.sampling,
            self._vocab_size,
            self._eos_token_ids,
            full_words=self._compiler.mask_words,
            end_token=self._compiler.end_token,
            token_bytes=self._compiler.token_bytes,
        )
        if state.is_active:
            state.refresh()
            if state.error is not None or state.ended:
                why = state.error or "it allows nothing but the empty text"
                return InvalidRequest(f"{param}: {why}", param=param)
        self._states[name] = state
        return None

    def _refresh(self, states: Sequence[GrammarState]) -> None:
        if len(states) < _TOGETHER:
            for state in states:
                state.refresh()
            return
        import numpy as np

        if self._executor is None:
            from llguidance import LLExecutor

            count = min(_MASK_THREADS, len(_all_cores()))
            with ThreadPoolExecutor(1, initializer=_use_all_cores) as maker:  # threads inherit its cores
                self._executor = maker.submit(LLExecutor, count).result()
        words = len(states[0].full_mask)
        whole = np.empty((len(states), words), np.int32)
        matchers = [(state.matcher, at) for at, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(matchers, whole.ctypes.data, 4 * words, len(states))
        for row, state in zip(whole, states, strict=True):
            state.full_mask[:] = row
            state.settle()


def make_grammars(
    folder: Path, facts: ModelFacts, *, wake: Callable[[], None], clock: Callable[[], float]
) -> RequestGrammars:
    """For the artifact in `folder`. Nothing is read or started before the first grammar."""
    path = folder / "tokenizer" / "tokenizer.json"
    compiler = GrammarCompiler(path, facts.vocab_size, facts.eos_token_ids)
    return RequestGrammars(
        compiler,
        vocab_size=facts.vocab_size,
        eos_token_ids=frozenset(facts.eos_token_ids),
        wake=wake,
        clock=clock,
    )


def _all_cores() -> set[int]:
    """Cores that any thread of this process may use: the engine's own is bound to one."""
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        try:
            cores |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # it has just ended
            continue
    return cores or os.sched_getaffinity(0)


def _use_all_cores() -> None:
    os.sched_setaffinity(0, _all_cores())
