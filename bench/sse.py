"""Server-sent events from bytes that come in any pieces."""

from __future__ import annotations

MAX_EVENT_BYTES = 64 << 20


class EventReader:
    """Gives the `data` of each complete event. Comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes of `_data`

    def feed(self, piece: bytes) -> list[bytes]:
        """Events that `piece` completes; lines may end with LF or CRLF. ValueError for one without an end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._held += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._held = 0
        if len(self._rest) + self._held > MAX_EVENT_BYTES:
            raise ValueError(f"an event is over {MAX_EVENT_BYTES} bytes")
        return events
