"""Logging set-up: one handler, one format, for every ostinato process."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup(level: str = "INFO", *, stream: object = None) -> None:
    """Install ostinato's handler on the `ostinato` logger. Calling it twice changes the level only."""
    logger = logging.getLogger("ostinato")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(stream or sys.stderr)  # type: ignore[arg-type]  # any text stream
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
