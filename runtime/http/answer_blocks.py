"""An answer as a list of blocks: text, reasoning, tool calls. For APIs whose answers are made of such parts.

Both renderings of these APIs come from here: a stream tells the block events, a whole answer lists `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ostinato.runtime.choice_output import ShownToken

Kind = Literal["text", "reasoning", "call"]


class Piece(NamedTuple):
    """What one event of an answer adds: text of a kind, or the beginning of a call.

    A call begins with a piece that has its `call_id`; pieces of its arguments have none.
    """

    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    tokens: tuple[ShownToken, ...] = ()


@dataclass
class Block:
    """One part of an answer, at `index` among them."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text, thoughts, or a call's arguments as JSON text."""
        return "".join(self.pieces)


class BlockEvent(NamedTuple):
    """`start`, then any number of `delta`s with their piece, then `stop`; one block at a time."""

    what: Literal["start", "delta", "stop"]
    block: Block
    piece: Piece | None = None


class AnswerBlocks:
    """Sorts pieces into blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, piece: Piece) -> Iterator[BlockEvent]:
        """Events of one piece. Text of the kind that is open goes on with its block."""
        begins_call = bool(piece.call_id)
        if not begins_call and not piece.text and not piece.tokens:
            return
        if self._open is None or self._open.kind != piece.kind or begins_call:
            yield from self.close()
            self._open = Block(piece.kind, len(self.blocks), piece.call_id, piece.name)
            self.blocks.append(self._open)
            yield BlockEvent("start", self._open)
        if piece.text or piece.tokens:
            self._open.pieces.append(piece.text)
            self._open.tokens.extend(piece.tokens)
            yield BlockEvent("delta", self._open, piece)

    def close(self) -> Iterator[BlockEvent]:
        """The end of what is open."""
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockEvent("stop", block)
