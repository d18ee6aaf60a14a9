"""Fields of a request that its schema does not have: without effect, known and refused, or unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from ostinato.runtime.near_word import near_word


def keep_known(
    fields: Any,  # Any: what pydantic hands to every "before" validator
    *,
    known: Collection[str],
    ignored: Collection[str],
    unsupported: Mapping[str, tuple[object, ...]],
) -> Any:
    """`fields` that the schema reads.

    `ignored` ones go, `unsupported` ones go too if their value asks for nothing (null, or one of those
    listed); PydanticCustomError names any other in `ctx["at"]`.
    """
    if not isinstance(fields, dict):
        return fields
    kept = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not _asks_for_nothing(value, unsupported[name]):
                accepted = " or ".join(["null", *(repr(one) for one in unsupported[name])])
                said = f"is not supported; leave it out or give {accepted}"
                raise PydanticCustomError("unsupported", "{said}", {"at": name, "said": said})
        elif name not in ignored:
            said = "is not a known field" + near_word(name, known, likeness=0.8, lead="; ")
            raise PydanticCustomError("unknown_field", "{said}", {"at": name, "said": said})
    return kept


def _asks_for_nothing(value: object, accepted: tuple[object, ...]) -> bool:
    # `False == 0` in Python, not in JSON.
    return any(type(value) is type(one) and value == one for one in accepted)
