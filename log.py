"""Logging set-up: one handler, one format, for every ostinato process; no message can flood it."""

import logging
import sys
import time
from collections.abc import Callable

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
MOST_LINES = 20  # of one message (one place in the code, whatever its arguments) in ...
WINDOW_S = 10.0
_MOST_MESSAGES = 1000  # that are told apart


class Bounded(logging.Filter):
    """Lets at most `MOST_LINES` of one message pass in `WINDOW_S`; the next one says how many did not.

    What clients cause (malformed bytes, failing requests) could otherwise fill a disk.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], list[float]] = {}  # message -> window's begin, lines, left out

    def filter(self, record: logging.LogRecord) -> bool:
        """False: leave it out."""
        now, key = self._clock(), (record.name, record.levelno, str(record.msg))
        if key not in self._seen and len(self._seen) >= _MOST_MESSAGES:
            self._seen.clear()
        seen = self._seen.setdefault(key, [now, 0, 0])
        if now - seen[0] >= WINDOW_S:
            seen[:2] = now, 0
        if seen[1] >= MOST_LINES:
            seen[2] += 1
            return False
        seen[1] += 1
        if seen[2]:
            record.msg = f"{record.msg} ({seen[2]:.0f} more like it were left out)"
            seen[2] = 0
        return True


def setup(level: str = "INFO", *, stream: object = None) -> None:
    """Install ostinato's handler on the `ostinato` logger. Calling it twice changes the level only."""
    logger = logging.getLogger("ostinato")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(stream or sys.stderr)  # type: ignore[arg-type]  # any text stream
        handler.setFormatter(logging.Formatter(FORMAT))
        handler.addFilter(Bounded())
        logger.addHandler(handler)
        logger.propagate = False
