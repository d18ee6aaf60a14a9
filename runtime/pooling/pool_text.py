"""Texts as models to embed or score with get them: one text or a pair, with special tokens, perhaps cut."""

from __future__ import annotations

import base64
import struct
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from ostinato.errors import InvalidRequest


class Encoded(NamedTuple):
    """Token ids of an input, and of which text of a pair each is (0 or 1, as the tokenizer says)."""

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...]


def encode_input(
    tokenizer: Tokenizer,
    first: str,
    second: str | None,
    *,
    kept: int | None,
    add_special_tokens: bool = True,
) -> Encoded:
    """Ids as the tokenizer's own template joins them.

    With `kept` at most so many, special tokens counted: ends are cut off, of a pair that of the longer text,
    and of both where they would still be too long. InvalidRequest: nothing would be left.
    """
    texts = [first] if second is None else [first, second]
    parts = tokenizer.encode_batch(texts, add_special_tokens=False)
    if kept is not None:
        special = tokenizer.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        _cut(parts, kept - special, kept)
    whole = tokenizer.post_process(parts[0], parts[1] if second is not None else None, add_special_tokens)
    return Encoded(tuple(whole.ids), tuple(whole.type_ids))


def _cut(parts: list[Encoding], room: int, kept: int) -> None:
    if room < len(parts):
        raise InvalidRequest(
            f"truncate_prompt_tokens: {kept} tokens leave no room for text between the special tokens",
            param="truncate_prompt_tokens",
        )
    lengths = [len(part.ids) for part in parts]
    if len(parts) == 1:
        lengths = [min(lengths[0], room)]
    elif sum(lengths) > room:
        shorter = min(*lengths, room // 2)
        is_first = lengths[0] <= lengths[1]
        lengths = [shorter, room - shorter] if is_first else [room - shorter, shorter]
    for part, length in zip(parts, lengths, strict=True):
        if length < len(part.ids):
            part.truncate(length)


def floats(numbers: str) -> list[float]:
    """The numbers of a `PoolResult`."""
    raw = base64.b64decode(numbers)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
