"""Whether a tool's parameters have the shape of a JSON schema, for grammars that are made of them here.

llguidance says so itself of the schemas that it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.errors import InvalidRequest

_LISTS = ("anyOf", "oneOf", "allOf")
_MAPS = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties")


def check_shape(schema: Mapping[str, Any], tool: str) -> None:
    """InvalidRequest that names the tool and the keyword whose value is of a wrong kind."""
    inner: list[Any] = [schema]  # Any: JSON
    while inner:
        one = inner.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise _wrong(tool, f"{one!r:.40} stands where a schema belongs")
        for key in _MAPS:
            if key in one:
                if not isinstance(one[key], Mapping):
                    raise _wrong(tool, f"{key} must be an object")
                inner += one[key].values()
        for key in _LISTS:
            if key in one:
                if not isinstance(one[key], list) or not one[key]:
                    raise _wrong(tool, f"{key} must be a list that is not empty")
                inner += one[key]
        inner += [one[key] for key in _SCHEMAS if key in one]
        if "enum" in one and not (isinstance(one["enum"], list) and one["enum"]):
            raise _wrong(tool, "enum must be a list that is not empty")
        if not _are_texts(one.get("required", [])):
            raise _wrong(tool, "required must be a list of names")
        if not isinstance(one.get("$ref", ""), str):
            raise _wrong(tool, "$ref must be a string")
        kinds = one.get("type", "")
        if not isinstance(kinds, str) and not (kinds and _are_texts(kinds)):
            raise _wrong(tool, "type must be a string or a list of strings")


def check_names(schema: Mapping[str, Any], barred: str, tool: str, *, deep: bool) -> None:
    """InvalidRequest for a parameter that the model's notation cannot name: it has a character of `barred`.

    `deep`: parts of a parameter are named in that notation, too. The schema has passed `check_shape`.
    """
    names = [*schema.get("properties", {})]
    inner: list[Any] = [schema] if deep else []  # Any: JSON
    while inner:
        one = inner.pop()
        if isinstance(one, Mapping):
            names += one.get("properties", {})
            inner += [part for key in _MAPS for part in one.get(key, {}).values()]
            inner += [part for key in _LISTS for part in one.get(key, ())]
            inner += [one[key] for key in _SCHEMAS if key in one]
    for name in names:
        if not name or name != name.strip() or any(char in barred for char in name):
            raise InvalidRequest(
                f"tools: the parameter {name!r:.80} of {tool!r:.80} cannot be named in this model's notation "
                "of calls; use letters, digits and _",
                param="tools",
            )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _wrong(tool: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"tools: the parameters of {tool!r:.80} are no JSON schema: {what}", param="tools")
