"""What prompts and inputs may be: text or token ids, one or several, perhaps cut."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.wire import TokenId, Whole


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "#text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "#texts" if isinstance(first, str) else "#id_lists" if isinstance(first, list) else "#ids"


BY_KIND = Discriminator(
    _kind,
    custom_error_type="prompt_kind",
    custom_error_message="must be a string, a list of token ids, or a non-empty list of either",
)
"""Of a union of `Text`, `Ids` and lists of either, which are tagged `#texts` and `#id_lists`."""
Text = Annotated[str, Tag("#text")]
IdList = Annotated[list[TokenId], Field(fail_fast=True)]
Ids = Annotated[IdList, Tag("#ids")]


def _keeps_something(tokens: int) -> int:
    if tokens == 0:
        raise PydanticCustomError("no_prompt", "must be -1, or 1 or more")
    return tokens


Kept = Annotated[
    Whole,
    Field(ge=-1),
    AfterValidator(_keeps_something),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]}),
]
"""Of `truncate_prompt_tokens`."""
