"""An answer as a list of blocks: text, reasoning, tool calls. For APIs whose answers are made of such parts.

Both renderings of these APIs come from here: a stream tells the block events, a whole answer lists `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ostinato.runtime.choice_output import ShownToken
from ostinato.runtime.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """One part of an answer, at `index` among them. `whole`: nothing cut it short."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    whole: bool = True
    pieces: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text, thoughts, or a call's arguments as JSON text."""
        return "".join(self.pieces)


class BlockEvent(NamedTuple):
    """`start`, then any number of `delta`s with what they add, then `stop`; one block at a time."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""
    tokens: tuple[ShownToken, ...] = ()


class AnswerBlocks:
    """Sorts the events of an answer into blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, events: Iterable[Event], tokens: tuple[ShownToken, ...] = ()) -> Iterator[BlockEvent]:
        """What `events` do to the blocks. `tokens` are listed with the last text among them.

        Text of the kind that is open goes on with its block.
        """
        events = list(events)
        last_text = max((at for at, event in enumerate(events) if isinstance(event, Content)), default=-1)
        if tokens and last_text < 0:  # a token without text of its own
            events.append(Content(""))
            last_text = len(events) - 1
        for at, event in enumerate(events):
            match event:
                case Content(text):
                    yield from self._more("text", text, tokens if at == last_text else ())
                case Reasoning(text):
                    yield from self._more("reasoning", text)
                case CallStart(_, call_id, name):
                    yield from self._begin(Block("call", len(self.blocks), call_id, name))
                case CallArguments(_, text):
                    yield from self._more("call", text)
                case CallEnd(_, whole):
                    if self._open is not None:
                        self._open.whole = whole
                    yield from self.close()

    def close(self, *, whole: bool = True) -> Iterator[BlockEvent]:
        """The end of what is open; `whole` is false when the answer ends here for want of room."""
        if self._open is not None:
            block, self._open = self._open, None
            block.whole = block.whole and whole
            yield BlockEvent("stop", block)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = block
        self.blocks.append(block)
        yield BlockEvent("start", block)

    def _more(self, kind: Kind, text: str, tokens: tuple[ShownToken, ...] = ()) -> Iterator[BlockEvent]:
        if not text and not tokens:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        block = self.blocks[-1]
        block.pieces.append(text)
        block.tokens.extend(tokens)
        yield BlockEvent("delta", block, text, tokens)
