"""Ends a chat template that takes too long or writes too much, and has its thread back.

The model's own template is as trusted as the model, but what it is given is not: nested loops over half a
million messages take hours.  Python cannot end a thread, but it can raise an exception in one, at the next
bytecode: that ends every loop of a template, since those are Python loops.  It cannot end one long call into
C; a template that a request brings itself can make such a call, so it runs in a process of its own
(http/request_template.py).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ostinato.errors import InvalidRequest

T = TypeVar("T")

MAX_OUTPUT = 64 * 2**20  # characters
_AGAIN_S = 0.1  # an exception may be swallowed on its way; it is raised again until the work is over
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]


class _TimeIsUp(BaseException):
    """Raised inside the work. No Exception: else it could be taken for an objection of the template."""


class _Work:
    """One run of a template in the thread that made this."""

    def __init__(self, seconds: float) -> None:
        self.due = time.monotonic() + seconds
        self.thread = threading.get_ident()
        self.interrupted = False


class _Watch:
    """One thread that looks after all running templates; it sleeps while there is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[_Work] = set()
        self._thread: threading.Thread | None = None
        self._looks_at = float("inf")  # when the thread wakes by itself

    def begin(self, work: _Work) -> None:
        with self._changed:
            self._running.add(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="template-watch", daemon=True)
                self._thread.start()
            elif work.due < self._looks_at:  # rarely: it stays awake for a while after the last one
                self._changed.notify()

    def end(self, work: _Work) -> None:
        """From here on nothing is raised in the thread of `work`."""
        with self._changed:
            self._running.discard(work)
            if work.interrupted:
                _raise_in(work.thread, ctypes.py_object())  # NULL: takes a pending one back

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for work in self._running:
                    if work.due <= now:
                        work.interrupted = True
                        work.due = now + _AGAIN_S
                        _raise_in(work.thread, _TimeIsUp)
                self._looks_at = min((work.due for work in self._running), default=float("inf"))
                self._changed.wait(self._looks_at - now if self._running else None)


_watch = _Watch()


def within(seconds: float, render: Callable[[], T]) -> T:
    """`render()` in this thread; InvalidRequest when it takes longer."""
    try:
        work = _Work(seconds)
        _watch.begin(work)
        try:
            return render()
        finally:
            _watch.end(work)
    except _TimeIsUp:
        raise InvalidRequest(
            f"messages: the chat template did not finish within {seconds:g} s (server.template_timeout_s); "
            "send fewer or shorter messages",
            param="messages",
        ) from None


def limit_output(template: Any) -> None:
    """Make a jinja2 template (Any: the library's type has no such field) stop at `MAX_OUTPUT` characters."""
    whole = template.root_render_func
    if getattr(whole, "is_limited", False):
        return

    def limited(context: object) -> Iterator[str]:
        written = 0
        for piece in whole(context):
            written += len(piece)
            if written > MAX_OUTPUT:
                raise InvalidRequest(
                    f"messages: the chat template writes over {MAX_OUTPUT} characters; send less text",
                    param="messages",
                )
            yield piece

    limited.is_limited = True  # type: ignore[attr-defined]  # read above
    template.root_render_func = limited
