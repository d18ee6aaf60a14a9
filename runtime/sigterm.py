"""SIGTERM as an exception, so that what is half made is cleaned up as it is after Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Within the context SIGTERM raises SystemExit(143), 143 being what a shell calls this end.

    Only in the main thread, and only where SIGTERM would end the process at once: who handles it otherwise
    is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
