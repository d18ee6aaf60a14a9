"""Pieces of grammars in llguidance's Lark dialect: quoted text, markers, JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

TokenId = Callable[[str], int | None]
"""The id of the one token that a text is, or None: `tokenizers.Tokenizer.token_to_id`."""

WHITE_SPACE = r"[ ]{1,4}|(\r?\n){1,2}[ \t]{0,64}"  # between parts of JSON: weak models write it for ever


def quoted(text: str) -> str:
    """Text as it is. Not empty."""
    return json.dumps(text)


def sequence(*parts: str) -> str:
    """Parts that follow each other; empty ones are left out."""
    return " ".join(part for part in parts if part)


def text(literal: str, token_id: TokenId | None = None) -> str:
    """A literal, which may be empty, or begin or end with markers that are single tokens of the model.

    Such a token is not what the same characters are in pieces: the grammar must name it.
    """
    if not literal:
        return ""
    if token_id is None:
        return quoted(literal)
    parts: list[str] = []
    plain = ""
    at = 0
    while at < len(literal):
        marker = _marker(literal, at, token_id)
        if marker is None:
            plain += literal[at]
            at += 1
            continue
        if plain:
            parts.append(quoted(plain))
            plain = ""
        parts.append(f"<[{token_id(marker)}]>")
        at += len(marker)
    if plain:
        parts.append(quoted(plain))
    return " ".join(parts)


def is_token(marker: str, token_id: TokenId | None) -> bool:
    """Whether a marker is one token."""
    return token_id is not None and token_id(marker) is not None


def json_value(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
    """A value that a JSON schema allows; `lenient`: keywords that cannot be enforced are ignored."""
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    body = {"allOf": [schema]} if isinstance(schema, bool) else dict(schema)
    return "%json " + json.dumps({**body, "x-guidance": options}, ensure_ascii=False)


_PIECE = re.compile(r"\\.|/|\n|\r", re.DOTALL)  # of an expression, with what is escaped in one piece
_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def regex(pattern: str) -> str:
    """What a regular expression matches."""
    return f"/{_PIECE.sub(lambda found: _ESCAPED.get(found[0][-1], found[0]), pattern)}/"


def schemas_in(grammar: str) -> list[Any]:  # Any: JSON
    """The JSON schemas of a grammar, as far as they can be read."""
    found = []
    for piece in grammar.split("%json")[1:]:
        with suppress(ValueError):
            found.append(json.JSONDecoder().raw_decode(piece.lstrip())[0])
    return found


def one_of(texts: Sequence[str]) -> str:
    """A whole grammar: one of the texts."""
    return "start: " + " | ".join(quoted(one) for one in dict.fromkeys(texts)) + "\n"


_BRACKETS = {"<": ">", "[": "]"}


def _marker(literal: str, at: int, token_id: TokenId) -> str | None:
    """The marker that begins here: something in angle or square brackets that is one token."""
    closing = _BRACKETS.get(literal[at])
    if closing is None:
        return None
    end = literal.find(closing, at)
    marker = literal[at : end + 1]
    return marker if end > at + 1 and token_id(marker) is not None else None
