"""What an operator asks of a running engine: memory, sleep, the prefix cache, ends of requests, profiles.

Each call is done between two steps, in the order in which calls and requests come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from ostinato.errors import EngineError, RequestError
from ostinato.runtime.kv_sizer import KVSizer, Moves
from ostinato.runtime.messages import (
    Call,
    CallDone,
    EndRequests,
    EngineState,
    KVTarget,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    TokenEvent,
    Wake,
)
from ostinato.runtime.profiler import Profiler
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.sleep import Sleeper

log = logging.getLogger(__name__)


class EngineCalls:
    """Answers calls. `settle` settles every step in flight, `end` ends live requests; both return events.

    `move` moves the content of blocks, as `KVSizer.cut` wants it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sizer: KVSizer,
        sleeper: Sleeper,
        profiler: Profiler,
        *,
        settle: Callable[[], list[TokenEvent]],
        end: Callable[[Iterable[str]], list[TokenEvent]],
        move: Callable[[Moves], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._sizer, self._sleeper, self._profiler = scheduler, sizer, sleeper, profiler
        self._settle, self._end, self._move, self._clock = settle, end, move, clock
        self._kv_target_bytes: int | None = None

    def answer(self, call: Call) -> tuple[CallDone, list[TokenEvent]]:
        """Do what a call asks for. Steps in flight are settled before what they must not see, never after."""
        began, news = self._clock(), dict[str, Any]()  # Any: fields of CallDone
        events: list[TokenEvent] = []
        try:
            match call:
                case KVTarget(target_bytes=target):
                    self._sizer.set_target(target)
                    self._kv_target_bytes = target
                    events = self._cut()
                case Sleep(level=level):
                    self._sleeper.check(level)
                    events = self._settle()
                    self._sleeper.sleep(level)
                case ResetPrefixCache():
                    events = self._settle()  # else they would publish what was computed before
                    news = {"count": self._scheduler.pool.forget_prefixes()}
                case EndRequests(request_ids=names):
                    events = self._settle()
                    ended = self._end(self._scheduler.request_ids if names is None else names)
                    events += ended
                    news = {"count": len(ended)}
                case StartProfile(seconds=seconds):
                    news = {"limit_s": self._profiler.start(seconds)}
                case StopProfile():
                    news = {"trace": self._profiler.stop()}
                case Wake():
                    self._sleeper.wake()
        except EngineError as error:
            log.warning("%s", error)
            param = error.param if isinstance(error, RequestError) else None
            kind = type(error).__name__
            return CallDone(call_id=call.call_id, error=str(error), kind=kind, param=param), events
        state = EngineState(
            asleep=self._sleeper.level,
            kv_bytes=self._sizer.physical_bytes,
            kv_target_bytes=self._kv_target_bytes,
            weights_bytes=self._sleeper.weights_bytes,
            seconds=self._clock() - began,
        )
        return CallDone(call_id=call.call_id, state=state, **news), events

    def _cut(self) -> list[TokenEvent]:
        """Take away what is above a new target now, so that the answer tells what is held from here on."""
        self._sizer.grow(self._scheduler.blocks_wanted())
        if not self._sizer.wants_quiet:
            return []
        events = self._settle()
        self._sizer.cut(self._move)
        self._sizer.wait()
        return events
