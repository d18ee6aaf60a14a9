"""One thing to send: a prompt, a conversation, a batch of inputs, or a query with documents."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class LoadItem:
    """`turns`: what the user says, one text per turn; the server's own answers stand between them.

    More than one turn is a conversation: the next turn is sent `pauses_s[turn]` seconds after the answer.
    """

    turns: list[str]
    output_tokens: int | None = None  # None: as long as the model likes
    system: str = ""
    pauses_s: list[float] | None = None  # before each turn; the first is 0
    messages: list[dict[str, Any]] | None = None  # a given chat history in front of the turns
    inputs: list[str] | None = None  # of embeddings
    documents: list[str] | None = None  # of rerank

    def dump(self) -> dict[str, Any]:
        """As JSON, for a worker."""
        return asdict(self)


def load_item(values: dict[str, Any]) -> LoadItem:
    """The inverse of `dump`."""
    return LoadItem(**values)
