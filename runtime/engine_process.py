"""An EngineClient whose engine is another process: nothing in this one can slow it down or kill it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

from ostinato import errors
from ostinato.errors import EngineDead
from ostinato.runtime.config import EngineConfig, without_secrets
from ostinato.runtime.frames import FrameReader, Message, Start, encode
from ostinato.runtime.messages import EngineInfo, Fatal, Order
from ostinato.runtime.openmp_spin import shorten_spin
from ostinato.runtime.request_streams import StreamingClient

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 10.0  # from hanging up to SIGKILL; the child ends after its current step


class EngineProcess(StreamingClient):
    """Starts `python -m <worker> FD` and talks to it in frames. `worker` is replaced by tests only."""

    def __init__(
        self, artifact: Path | str, config: EngineConfig, *, worker: str = "ostinato.runtime.engine_worker"
    ) -> None:
        super().__init__()
        self._artifact = str(artifact)
        self._config = without_secrets(config)
        self._worker = worker
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before `start`."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Return when the engine can serve; raise what went wrong in it otherwise."""
        if self._process is not None:
            raise RuntimeError("start() was called before: one EngineProcess is one process")
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", self._worker, str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, env=_child_environment(),
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(Start(artifact=self._artifact, config=self._config)))
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader, ready), name="ostinato-engine-reader")
        try:
            info = await ready
        except BaseException:
            await self.close()
            raise
        self._info = info.model_copy(update={"load_seconds": time.monotonic() - began})

    async def close(self) -> None:
        """Hang up, wait for the child to end, kill it if it does not. Open requests get EngineDead."""
        self._closing = True
        self._die(EngineDead("the engine was closed"))
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_GRACE_S)
            except TimeoutError:
                log.warning(
                    "engine process %d did not end in %.0f s: killed", self._process.pid, CLOSE_GRACE_S
                )
                self._process.kill()
                await self._process.wait()
        if self._reading is not None:
            await self._reading

    def _post(self, message: Order) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    async def _read(self, reader: asyncio.StreamReader, ready: asyncio.Future[EngineInfo]) -> None:
        """Deliver what the child says until it ends; then say why it ended."""
        frames = FrameReader()
        last_words: EngineDead | None = None
        fatal: Fatal | None = None
        try:
            while piece := await reader.read(1 << 18):
                messages = frames.feed(piece)
                fatal = next((m for m in messages if isinstance(m, Fatal)), fatal)
                self._deliver(m for m in messages if not isinstance(m, Fatal))
                _settle(ready, messages)
        except (OSError, EngineDead) as wrong:
            last_words = EngineDead(f"the stream from the engine process is broken: {wrong}")
        if self._process is None:
            return
        if last_words is not None:
            self._process.kill()
        code = await self._process.wait()
        reason = last_words or EngineDead(_obituary(code, fatal))
        if ready.done() and not self._closing:
            log.error("%s", reason)
        self._die(reason)
        if not ready.done():
            ready.set_exception(_start_error(fatal) if fatal else reason)


def _settle(ready: asyncio.Future[EngineInfo], messages: list[Message]) -> None:
    info = next((m for m in messages if isinstance(m, EngineInfo)), None)
    if info is not None and not ready.done():
        ready.set_result(info)


def _start_error(fatal: Fatal) -> errors.EngineError:
    """The child's exception in this process: the same class if it is one of ours."""
    kind = getattr(errors, fatal.kind, EngineDead)
    return kind(fatal.error)


def _obituary(code: int, fatal: Fatal | None) -> str:
    if fatal is not None:
        return f"the engine process ended: {fatal.error}"
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the kernel does this when memory runs out: see kv.headroom_gib" if name == "SIGKILL" else ""
        return f"the engine process was killed by {name}{hint}"
    return f"the engine process ended with exit code {code}; its log says more"


def _child_environment() -> dict[str, str]:
    environ = dict(os.environ)
    shorten_spin(environ)
    return environ
