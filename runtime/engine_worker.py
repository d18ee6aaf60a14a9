"""The engine's own process: `python -m ostinato.runtime.engine_worker FD`, FD being its end of a socket pair.

The parent decides when it ends: end of stream means stop.  SIGINT and SIGTERM, which a terminal or service
manager sends to the whole group, are ignored so that the parent can let running requests finish.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato import log as logs
from ostinato.errors import EngineDead, EngineError
from ostinato.runtime.frames import FrameReader, FrameWriter, Message, Start
from ostinato.runtime.load_ahead import load_ahead
from ostinato.runtime.messages import Fatal, Order

if TYPE_CHECKING:
    from ostinato.runtime.config import EngineConfig
    from ostinato.runtime.runner import Model

log = logging.getLogger("ostinato.runtime.engine_worker")  # __name__ is __main__ here

ORPHAN_GRACE_S = 10.0  # a step that outlives its parent by this long is cut off


def main(load: Callable[[Path, EngineConfig], Model] | None = None) -> int:
    """Serve the parent until it hangs up; return the exit code. `load` stands in for `load_artifact`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    writer = FrameWriter(sock)
    try:
        _serve(sock, writer, load)
    except Exception as wrong:  # a process border: whatever it is, the parent must hear of it
        if isinstance(wrong, OSError) and wrong.errno in (errno.EPIPE, errno.ECONNRESET):  # nobody listens
            return 0
        if not isinstance(wrong, EngineError):  # those explain themselves, and the parent tells them
            log.exception("engine process ends")
        _say_farewell(writer, wrong)
        return 1
    return 0


def _serve(
    sock: socket.socket, writer: FrameWriter, load: Callable[[Path, EngineConfig], Model] | None
) -> None:
    reader = FrameReader()
    start, early = _first_message(sock, reader)
    if start is None:
        return
    logs.setup(start.config.log_level)
    folder = Path(start.artifact)
    with load_ahead(folder) as digest:
        # Imported here: the parent may hang up first, and importing torch takes a second.
        from ostinato.runtime.any_engine import make_engine
        from ostinato.runtime.cpu_threads import bound_threads, plan_threads
        from ostinato.runtime.inbox import Inbox

        if load is None:
            from ostinato.runtime.artifact import load_artifact

            load = partial(load_artifact, digest=digest)
        inbox = Inbox()
        inbox.put(*early)
        listener = threading.Thread(target=_listen, args=(sock, reader, inbox.put, inbox.close), daemon=True)
        listener.start()  # before the binding below: a new thread inherits its maker's core
        model = load(folder, start.config)
    with bound_threads(plan_threads(start.config.cpu), start_team=model.start_team):
        engine = make_engine(model, start.config, inbox=inbox)
        gc.collect()
        gc.freeze()  # what is loaded stays: no later collection needs to look at it
        with engine:
            writer.send([engine.info])
            engine.serve(_SocketOutlet(writer))
    gc.unfreeze()  # libraries complain at exit about objects that were never collected


class _SocketOutlet:
    """Engine news as frames; never waits while there is work."""

    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer

    def send(self, messages: Sequence[Message]) -> None:
        self._writer.send(messages)

    def idle(self) -> None:
        self._writer.flush()


def _first_message(sock: socket.socket, reader: FrameReader) -> tuple[Start | None, list[Order]]:
    """The start message, and what came behind it already. None: the parent hung up without one."""
    messages: list[Message] = []
    while not messages:
        piece = sock.recv(1 << 16)
        if not piece:
            return None, []
        messages = reader.feed(piece)
    if not isinstance(messages[0], Start):
        raise EngineDead(f"the first message is {type(messages[0]).__name__}, not Start")
    return messages[0], _requests(messages[1:])


def _listen(
    sock: socket.socket,
    reader: FrameReader,
    put: Callable[..., None],
    close: Callable[[], None],
) -> None:
    """Fill the inbox until the parent hangs up; then make sure that this process ends."""
    try:
        while piece := sock.recv(1 << 16):
            put(*_requests(reader.feed(piece)))
    except (OSError, EngineDead):
        log.exception("the stream from the parent is broken")
    close()
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)  # this thread is a daemon: getting here means that the engine did not end


def _requests(messages: Sequence[Message]) -> list[Order]:
    wrong = next((m for m in messages if not isinstance(m, Order)), None)
    if wrong is not None:
        raise EngineDead(f"unexpected {type(wrong).__name__} from the parent")
    return [m for m in messages if isinstance(m, Order)]


def _say_farewell(writer: FrameWriter, wrong: Exception) -> None:
    kind = type(wrong).__name__ if isinstance(wrong, EngineError) else "EngineDead"
    text = str(wrong) if isinstance(wrong, EngineError) else f"{type(wrong).__name__}: {wrong}"
    try:
        writer.send([Fatal(error=text, kind=kind)])
        writer.flush()
    except OSError:
        log.warning("the parent is gone; nobody to tell")


if __name__ == "__main__":
    sys.exit(main())
