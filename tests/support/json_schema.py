"""The part of JSON Schema 2020-12 that /openapi.json uses."""

from __future__ import annotations

import re
from typing import Any

_TYPES = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == int(v),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_KNOWN = {
    "$ref", "type", "enum", "const", "anyOf", "properties",
    "additionalProperties", "patternProperties", "required", "items", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems",
    "maxItems", "maxProperties", "title", "description", "default", "x-default",
}  # fmt: skip


def fits(schema: Any, value: object, document: dict[str, Any]) -> bool:
    """Whether `value` is what `schema` describes. AssertionError for a word that is not known here."""
    if isinstance(schema, bool):
        return schema
    assert schema.keys() <= _KNOWN, schema.keys() - _KNOWN
    if "$ref" in schema:
        return fits(_target(schema["$ref"], document), value, document)
    kind = schema.get("type")
    if kind is not None and not _TYPES[kind](value):
        return False
    if "enum" in schema and not any(_equal(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    if "anyOf" in schema and not any(fits(one, value, document) for one in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        return _object_fits(schema, value, document)
    if isinstance(value, list):
        items = schema.get("items", True)
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9) and all(
            fits(items, item, document) for item in value
        )
    if isinstance(value, str):
        length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
        return length and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )
    return True


def _object_fits(schema: dict[str, Any], value: dict[str, object], document: dict[str, Any]) -> bool:
    if len(value) > schema.get("maxProperties", 10**9) or not set(schema.get("required", ())) <= value.keys():
        return False
    own, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items():
        matching = [own[name]] if name in own else []
        matching += [rule for pattern, rule in patterns.items() if re.search(pattern, name)]
        for rule in matching or [schema.get("additionalProperties", True)]:
            if not fits(rule, item, document):
                return False
    return True


def _target(ref: str, document: dict[str, Any]) -> Any:
    node: Any = document
    for step in ref.removeprefix("#/").split("/"):
        node = node[step]
    return node


def _equal(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
