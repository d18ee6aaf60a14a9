"""The asyncio half that every engine client shares: one event queue per request, and what ends it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import count

from ostinato import errors
from ostinato.errors import EngineDead, EngineError, InvalidRequest, RequestAborted, RequestError
from ostinato.runtime.frames import Events, Message
from ostinato.runtime.messages import (
    Abort,
    Call,
    CallDone,
    EndRequests,
    EngineInfo,
    EngineState,
    EngineStats,
    Fatal,
    GenerateRequest,
    KVTarget,
    Order,
    PoolRequest,
    PoolResult,
    PoolResults,
    Refused,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    TokenEvent,
    Wake,
)
from ostinato.runtime.pooling.pool_answers import PoolAnswers
from ostinato.runtime.pooling.pool_check import check_pool_request
from ostinato.runtime.reader_mail import ReaderMail
from ostinato.runtime.request_check import check_request, name_in_use


class StreamingClient(ABC):
    """An EngineClient without its engine: subclasses carry messages there (`_post`) and back (`_deliver`).

    The mail of a reader is unbounded, so a slow reader never holds up the engine; `max_tokens` bounds it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queues: dict[str, ReaderMail] = {}
        self._pools = PoolAnswers()
        self._ending: set[str] = set()  # closed by their reader; the engine's last event is still to come
        self._calls: dict[int, asyncio.Future[CallDone]] = {}
        self._call_ids = count(1)
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._dead: EngineDead | None = None
        self._progress_at = clock()

    @abstractmethod
    def _post(self, message: Order) -> None:
        """Send to the engine; must not block and must not raise when the engine has just died."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model; valid after `start`."""
        if self._info is None:
            raise EngineDead("the engine is not started: await start() first")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""
        return self._stats

    @property
    def stalled_seconds(self) -> float:
        """Seconds without any news while requests are open; 0.0 if none is, or asleep. Raises EngineDead."""
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        if self._stats.asleep:
            return 0.0
        return self._clock() - self._progress_at if self._is_busy else 0.0

    @property
    def _is_busy(self) -> bool:
        return bool(self._queues or self._ending or len(self._pools))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Events of one request, the last with a `finish_reason`. Closing the iterator early aborts it.

        A reader that comes late gets the tokens of several steps in one event, unless it has stop strings.
        Raises Overloaded, ContextTooLong, InvalidRequest, EngineDead.
        """
        name = request.request_id
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        check_request(request, self.info)
        if name in self._queues or name in self._ending:
            raise name_in_use(name)
        if not self._is_busy:
            self._progress_at = self._clock()  # an idle engine owes no progress
        mail = ReaderMail(
            joins=not request.sampling.stop
        )  # tokens behind a stop string are not for its reader
        self._queues[name] = mail
        try:
            self._post(request)
            while True:
                for news in await mail.take():
                    if isinstance(news, EngineError):
                        raise news
                    yield news
                    if news.finish_reason is not None:
                        return
        finally:
            if self._queues.get(name) is mail:  # else the last event was delivered
                del self._queues[name]
                self._ending.add(name)
                self._post(Abort(request_ids=(name,)))

    async def pool(self, requests: Sequence[PoolRequest]) -> list[PoolResult]:
        """Numbers of all these inputs, in their order. One failure, or leaving early, ends all of them.

        Raises Overloaded, ContextTooLong, InvalidRequest, WrongTask, RequestAborted, EngineDead, EngineError.
        """
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        for request in requests:
            check_pool_request(request, self.info)
        if not self._is_busy:
            self._progress_at = self._clock()
        names = [request.request_id for request in requests]
        with self._pools.waiting(names) as answers:
            for request in requests:
                self._post(request)
            try:
                return await asyncio.gather(*answers)
            finally:
                if open_names := tuple(name for name in names if name in self._pools):
                    self._post(Abort(request_ids=open_names))

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel; unknown ids are ignored. Readers get a last event with finish_reason `abort`."""
        known = tuple(name for name in request_ids if name in self._queues or name in self._pools)
        for name in known:
            self._pools.refuse(name, RequestAborted("the request was aborted by the server"))
        if known and self._dead is None:
            self._post(Abort(request_ids=known))

    async def set_kv_target(self, target_bytes: int | None) -> EngineState:
        """Have at most so many bytes of KV memory; None: what the settings allow.

        Raises InvalidRequest, EngineDead.
        """
        if target_bytes is not None and target_bytes < 0:
            raise InvalidRequest(
                f"target_bytes={target_bytes}: must not be negative; None takes the target away",
                param="target_bytes",
            )
        return _state(await self._call(KVTarget(call_id=next(self._call_ids), target_bytes=target_bytes)))

    async def sleep(self, level: int) -> EngineState:
        """Give memory back until `wake`. Raises InvalidRequest, SleepRefused, EngineDead."""
        if level not in (1, 2):
            raise InvalidRequest(
                f"level={level!r}: must be 1 (weights are kept in host memory) or 2 (they are read again)",
                param="level",
            )
        return _state(await self._call(Sleep(call_id=next(self._call_ids), level=level)))

    async def wake(self) -> EngineState:
        """Undo `sleep`. Raises WakeFailed (it sleeps on), EngineDead."""
        return _state(await self._call(Wake(call_id=next(self._call_ids))))

    async def reset_prefix_cache(self) -> int:
        """Let no later request find what was computed so far; returns how many blocks could be found.

        Raises EngineDead.
        """
        return (await self._call(ResetPrefixCache(call_id=next(self._call_ids)))).count

    async def end_requests(self, request_ids: Sequence[str] | None) -> int:
        """As `abort`, of all for None; returns how many were ended, when their blocks are back.

        Raises EngineDead.
        """
        names = None if request_ids is None else tuple(request_ids)
        return (await self._call(EndRequests(call_id=next(self._call_ids), request_ids=names))).count

    async def start_profile(self, seconds: float | None) -> float:
        """Record what the engine's process does; returns the seconds after which the profile ends by itself.

        None: `profile.max_seconds`.  Raises InvalidRequest, ProfileRefused, EngineDead.
        """
        return (await self._call(StartProfile(call_id=next(self._call_ids), seconds=seconds))).limit_s

    async def stop_profile(self) -> str:
        """End the profile; returns the file. Raises ProfileRefused, EngineDead."""
        return (await self._call(StopProfile(call_id=next(self._call_ids)))).trace

    async def _call(self, call: Call) -> CallDone:
        """Send and wait for the answer. Who stops waiting does not stop the engine from doing it."""
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        answer: asyncio.Future[CallDone] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = answer
        try:
            self._post(call)
            return await answer
        finally:
            del self._calls[call.call_id]

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Hand news from the engine to their readers. Runs in the loop's thread."""
        self._progress_at = self._clock()
        for message in messages:
            match message:
                case Events(events=events):
                    self._route(events)
                case Refused():
                    refused = getattr(errors, message.error)(message.message, param=message.param)
                    if not self._pools.refuse(message.request_id, refused):
                        self._put(message.request_id, refused, is_last=True)
                case PoolResults(results=results):
                    self._pools.settle(results)
                case EngineStats():
                    self._stats = message
                case CallDone():
                    self._settle_call(message)
                case EngineInfo():
                    self._info = message
                case Fatal():
                    self._die(EngineDead(message.error))

    def _settle_call(self, done: CallDone) -> None:
        if done.state is not None:
            self._stats = self._stats.model_copy(update={"asleep": done.state.asleep})
        answer = self._calls.get(done.call_id)
        if answer is None or answer.done():  # nobody waits any more
            return
        if done.state is not None:
            answer.set_result(done)
            return
        kind: type[EngineError] = getattr(errors, done.kind, EngineError)
        if issubclass(kind, RequestError):
            answer.set_exception(kind(done.error, param=done.param))
        else:
            answer.set_exception(kind(done.error))

    def _route(self, events: Sequence[TokenEvent]) -> None:
        queues = self._queues
        for event in events:
            queue = queues.get(event.request_id)
            if event.finish_reason is None:
                if queue is not None:
                    queue.put(event)
            else:
                self._put(event.request_id, event, is_last=True)

    def _put(self, name: str, news: TokenEvent | EngineError, *, is_last: bool) -> None:
        queue = self._queues.pop(name, None) if is_last else self._queues.get(name)
        if queue is not None:
            queue.put(news)
        elif is_last:
            self._ending.discard(name)

    def _die(self, reason: EngineDead) -> None:
        """End every open request with `reason`; later ones get it at once. The first reason stays."""
        if self._dead is None:
            self._dead = reason
        for queue in self._queues.values():
            queue.put(EngineDead(str(self._dead)))
        self._pools.refuse_all(self._dead)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDead(str(self._dead)))
        self._queues.clear()
        self._ending.clear()


def _state(done: CallDone) -> EngineState:
    assert done.state is not None  # `_settle_call` raises where there is none
    return done.state
