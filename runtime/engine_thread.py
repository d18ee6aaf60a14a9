"""An EngineClient whose engine is a thread of this process; `LLM` uses it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.errors import EngineDead, EngineError
from ostinato.runtime.any_engine import make_engine
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.cpu_threads import bound_threads, plan_threads
from ostinato.runtime.frames import Message
from ostinato.runtime.inbox import Inbox
from ostinato.runtime.messages import EngineInfo, Order
from ostinato.runtime.request_streams import StreamingClient
from ostinato.runtime.runner import Model

log = logging.getLogger(__name__)

LOOP_REST = 8  # the loop's share of the interpreter is at most a ninth
LEAST_REST_S, MOST_REST_S = 0.001, 0.02  # a token is at most so much late; readers see 50 pieces a second


class EngineThread(StreamingClient):
    """Loads the model and runs the engine on a thread of its own. `load` stands in for `load_artifact`."""

    def __init__(
        self,
        artifact: Path | str,
        config: EngineConfig,
        *,
        load: Callable[[Path, EngineConfig], Model] | None = None,
    ) -> None:
        super().__init__()
        self._artifact = Path(artifact)
        self._config = config
        self._load = load
        self._inbox = Inbox()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Return when the engine can serve; raise what went wrong in it otherwise."""
        if self._thread is not None:
            raise RuntimeError("start() was called before: one EngineThread is one thread")
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(loop, ready), name="ostinato-engine", daemon=True
        )
        self._thread.start()
        try:
            self._info = await ready
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop after the current step and free the engine's memory. Open requests get EngineDead."""
        self._die(EngineDead("the engine was closed"))
        self._inbox.close()
        if self._thread is not None:
            await self._ended.wait()
            self._thread.join()

    def _post(self, message: Order) -> None:
        self._inbox.put(message)

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[EngineInfo]) -> None:
        began = time.monotonic()
        try:
            model = self._loaded()
            with bound_threads(plan_threads(self._config.cpu), start_team=model.start_team):
                engine = make_engine(model, self._config, inbox=self._inbox)
                with engine:
                    info = engine.info.model_copy(update={"load_seconds": time.monotonic() - began})
                    _call(loop, _set_result, ready, info)
                    engine.serve(LoopOutlet(loop, self._deliver, self._inbox))
        except Exception as wrong:  # a thread border: whatever it is, the clients must hear of it
            if isinstance(wrong, EngineError) and not isinstance(wrong, EngineDead):
                log.error("the engine ends: %s", wrong)  # meant for users: the message is all they need
            else:
                log.exception("engine thread ends")
            reason = (
                wrong if isinstance(wrong, EngineDead) else EngineDead(f"{type(wrong).__name__}: {wrong}")
            )
            first = wrong if isinstance(wrong, EngineError) else reason
            _call(loop, self._die, reason)
            _call(
                loop, _set_exception, ready, first.with_traceback(None)
            )  # frames would keep the memory alive
        finally:
            _call(loop, self._ended.set)

    def _loaded(self) -> Model:
        if self._load is not None:
            return self._load(self._artifact, self._config)
        from ostinato.runtime.artifact import load_artifact

        return load_artifact(self._artifact, self._config)


class LoopOutlet:
    """Engine news into an asyncio loop, which shares the interpreter with the engine.

    News that follow each other closely are handed over together: after each time the loop rests for
    LOOP_REST times what its readers took, so that they get a part of the time that the engine needs. The
    first news after a pause, and the last before one, are handed over at once. A loop that was closed stops
    the engine.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Sequence[Message]], None],
        inbox: Inbox,
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._inbox = inbox
        self._news: deque[Sequence[Message]] = deque()
        self._is_due = False  # the loop is going to look for news

    def send(self, messages: Sequence[Message]) -> None:
        """Called by the engine's thread, as is `idle`."""
        self._news.append(messages)
        if not self._is_due:
            self._is_due = True
            self._wake(self._look)

    def idle(self) -> None:
        """Whoever waits for the end of an answer shall not wait for the loop's rest."""
        self._wake(self._hand_over)

    def _wake(self, function: Callable[[], object]) -> None:
        if not _call(self._loop, function):
            self._inbox.close()

    def _look(self) -> None:
        began = time.thread_time()
        if self._hand_over():
            self._loop.call_soon(self._rest, began)  # behind the readers who have got something
            return
        self._is_due = False
        if self._news:  # came after the look, and saw that one was due
            self._is_due = True
            self._loop.call_soon(self._look)

    def _rest(self, began: float) -> None:
        busy_s = time.thread_time() - began
        self._loop.call_later(min(max(LOOP_REST * busy_s, LEAST_REST_S), MOST_REST_S), self._look)

    def _hand_over(self) -> bool:
        messages: list[Message] = []
        while self._news:
            messages += self._news.popleft()
        if messages:
            self._deliver(messages)
        return bool(messages)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> bool:
    """Call in the loop's thread; False if the loop was closed without closing the client."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _set_result(ready: asyncio.Future[EngineInfo], info: EngineInfo) -> None:
    if not ready.done():
        ready.set_result(info)


def _set_exception(ready: asyncio.Future[EngineInfo], wrong: EngineError) -> None:
    if not ready.done():
        ready.set_exception(wrong)
