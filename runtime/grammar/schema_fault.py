"""Where a JSON schema is none: llguidance says what it could not read, not where it stood."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ostinato.runtime.near_word import near_word

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = (
    "items", "additionalProperties", "additionalItems", "propertyNames", "contains", "not", "if", "then",
    "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SHOWN = 60  # characters of what was got


def schema_fault(schema: object) -> str | None:
    """The first place with no schema, or with a `type` that JSON has not, and what may stand there.

    `properties.a.items.type: got "strng"; ...`. None if there is no such place.
    """
    waiting: list[tuple[str, object]] = [("", schema)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            return f"{place or 'the schema'}: got {_shown(one)}; give an object, true or false"
        if "type" in one:
            kinds = one["type"] if isinstance(one["type"], list) else [one["type"]]
            for kind in kinds:
                if kind not in TYPES:
                    meant = near_word(kind, TYPES, likeness=0.6, lead=", ")
                    return f"{_at(place, 'type')}: got {_shown(kind)}; types are {', '.join(TYPES)}{meant}"
        waiting += reversed([*_parts(one, place)])
    return None


def _parts(schema: Mapping[str, object], place: str) -> Iterator[tuple[str, object]]:
    """Schemas in a schema, in its order."""
    for key, value in schema.items():
        here = _at(place, key)
        if key in _MAPS and isinstance(value, Mapping):
            yield from ((_at(here, name), part) for name, part in value.items())
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            yield from ((f"{here}[{at}]", part) for at, part in enumerate(value))
        elif key in _SCHEMAS:
            yield here, value


def _at(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
