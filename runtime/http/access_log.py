"""One line per HTTP request on the logger `ostinato.access`: text or JSON, of a bounded rate.

No text of the client is in a line but its request id, which has no spaces and no control characters: paths
are shown as route patterns, keys by their name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from ostinato.runtime.http.request_record import RequestRecord

LINES_PER_S = 1000  # more are left out and counted; the next line says how many
log = logging.getLogger("ostinato.access")


def setup() -> None:
    """Lines go to stderr as they are, whatever the level of other messages. Calling it twice is fine."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)


class AccessLog:
    """Writes the lines of one server."""

    def __init__(
        self, style: Literal["off", "text", "json"], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.style = style
        self._clock = clock
        self._second = clock()
        self._lines = 0
        self._left_out = 0

    def write(
        self, record: RequestRecord, *, method: str, route: str, status: int, client: str | None
    ) -> None:
        """One request is over."""
        if self.style == "off" or not self._may_write():
            return
        now = time.monotonic()
        first_s, sequences = record.first_token_s(), record.sequences
        fields: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": record.id,
            "client": client,
            "key": None if record.caller is None else record.caller.name,
            "method": method,
            "route": route,
            "status": status,
            "ms": round((now - record.started) * 1000, 1),
        }
        if sequences:
            fields |= {
                "ttft_ms": None if first_s is None else round(first_s * 1000, 1),
                "sequences": len(sequences),
                "prompt_tokens": sum(times.prompt_tokens for times in sequences),
                "cached_tokens": sum(times.cached_tokens for times in sequences),
                "generated_tokens": sum(times.generated_tokens for times in sequences),
                "outcome": sequences[0].outcome,
            }
        if self._left_out:
            fields["left_out"] = self._left_out
            self._left_out = 0
        if self.style == "json":
            log.info("%s", json.dumps(fields))
        else:
            log.info("%s", " ".join(_word(name, value) for name, value in fields.items()))

    def _may_write(self) -> bool:
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > LINES_PER_S:
            self._left_out += 1
            return False
        return True


def _word(name: str, value: object) -> str:
    shown = "-" if value is None else str(value)
    return shown if name in ("time", "method", "route", "status") else f"{name}={shown}"
