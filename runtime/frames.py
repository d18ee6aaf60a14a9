"""Messages as bytes: what an engine process and its parent say to each other over one socket.

A frame is a big-endian uint32 (bytes that follow it), one byte for the kind of message, and the message as
JSON.  Nothing is pickled: a frame can only become one of the types in `KINDS`.  End of stream is the parent's
"stop" and the child's "gone"; there is no other goodbye.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence

from pydantic import ValidationError

from ostinato.errors import EngineDead
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.messages import (
    Abort,
    CallDone,
    EndRequests,
    EngineInfo,
    EngineStats,
    Fatal,
    GenerateRequest,
    KVTarget,
    Order,
    PoolRequest,
    PoolResults,
    Refused,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    TokenEvent,
    Wake,
)
from ostinato.section import Section

MAX_FRAME_BYTES = 1 << 28  # a prompt of 8 million tokens takes 60 MB as JSON; more is a broken stream
_HEAD = struct.Struct("!IB")


class Start(Section):
    """First frame to the child: what to load and how."""

    artifact: str
    config: EngineConfig


class Events(Section):
    """All events of one step, in one frame."""

    events: tuple[TokenEvent, ...]


Message = Start | Order | EngineInfo | EngineStats | Events | PoolResults | Refused | CallDone | Fatal
KINDS: tuple[type[Message], ...] = (
    Start,
    GenerateRequest,
    Abort,
    EngineInfo,
    EngineStats,
    Events,
    Refused,
    Fatal,
    PoolRequest,
    PoolResults,
    KVTarget,
    Sleep,
    Wake,
    CallDone,
    ResetPrefixCache,
    EndRequests,
    StartProfile,
    StopProfile,
)
_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}


def encode(message: Message) -> bytes:
    """One frame. Fields at their defaults are left out."""
    body = message.__pydantic_serializer__.to_json(message, exclude_defaults=True)
    if len(body) >= MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes: at most {MAX_FRAME_BYTES - 1} are allowed")
    return _HEAD.pack(len(body) + 1, _KIND_OF[type(message)]) + body


class FrameReader:
    """Cuts a byte stream, fed in any pieces, into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """Take more bytes; return the messages that are complete now.

        Raises EngineDead for bytes that are no frame: the stream cannot be trusted from there on.
        """
        self._bytes += piece
        messages: list[Message] = []
        at = 0
        while len(self._bytes) - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._bytes, at)
            if not 1 <= length <= MAX_FRAME_BYTES or kind >= len(KINDS):
                raise EngineDead(f"broken frame: kind {kind}, {length} bytes; the stream is not ours")
            end = at + 4 + length
            if len(self._bytes) < end:
                break
            messages.append(_decode(kind, bytes(self._bytes[at + _HEAD.size : end])))
            at = end
        del self._bytes[:at]
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._bytes)


def _decode(kind: int, body: bytes) -> Message:
    try:
        return KINDS[kind].model_validate_json(body)
    except ValidationError as wrong:
        raise EngineDead(f"broken frame: not a {KINDS[kind].__name__}: {wrong}") from wrong


class FrameWriter:
    """Sends frames without waiting for the reader: what the socket does not take now is kept for later."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unsent: deque[memoryview] = deque()

    @property
    def unsent_bytes(self) -> int:
        """Bytes kept because the reader is slow."""
        return sum(len(piece) for piece in self._unsent)

    def send(self, messages: Sequence[Message]) -> None:
        """Queue the messages and push what fits. Raises OSError when the other side is gone."""
        self._unsent.extend(memoryview(encode(message)) for message in messages)
        self._push(socket.MSG_DONTWAIT)

    def flush(self) -> None:
        """Wait until everything is sent. Raises OSError when the other side is gone."""
        self._push(0)

    def _push(self, flags: int) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0], flags | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            rest = self._unsent[0][sent:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()
