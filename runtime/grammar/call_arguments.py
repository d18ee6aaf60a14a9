"""Arguments of tool calls that are not written as JSON: Gemma 4's and Python's, from the tool's JSON schema.

    gemma4    {city:<|"|>Paris<|"|>,days:3,near:[1,2]}
    pythonic  city="Paris", days=3; values are JSON, which the reader takes as well

Arguments come in the schema's order. Gemma's notation knows types, enums, properties, required, items, anyOf
and local references; a strict schema with another keyword that limits values is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.lark_text import TokenId, json_value, quoted, sequence, text

QUOTE = '<|"|>'
_WORDS = {
    "title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions",
    "$schema", "$id", "type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "$ref",
    "additionalProperties", "nullable",
}  # fmt: skip
_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def pythonic_arguments(
    schema: Mapping[str, Any], name: str, token_id: TokenId, *, is_strict: bool
) -> tuple[str, list[str]]:
    """A right-hand side, and the rules that it needs."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pairs = []
    for key, value in schema.get("properties", {}).items():
        inner = {**value, **shared} if isinstance(value, Mapping) else value
        pairs.append((sequence(quoted(f"{key}="), json_value(inner, lenient=not is_strict)), key))
    return listed(pairs, set(schema.get("required", ())), name, quoted(", "))


def gemma4_arguments(
    schema: Mapping[str, Any], name: str, token_id: TokenId, *, is_strict: bool
) -> tuple[str, list[str]]:
    """A right-hand side, and the rules that it needs."""
    made = _Gemma(schema, name, token_id, is_strict=is_strict)
    return made.object(schema), made.lines


def listed(pairs: list[tuple[str, str]], required: set[str], name: str, comma: str) -> tuple[str, list[str]]:
    """A right-hand side and its rules: pairs in their order, those that are not required may be missing."""
    lines = []
    tail = ""  # rule of what may follow once a pair is written
    head = ""  # and before any is
    for at in range(len(pairs) - 1, -1, -1):
        pair, key = pairs[at]
        lines.append(f"{name}_pair_{at}: {pair}")
        optional = key not in required
        first = sequence(f"{name}_pair_{at}", tail)
        lines.append(f"{name}_head_{at}: {first}" + (f" | {head}" if optional and head else ""))
        lines.append(
            f"{name}_tail_{at}: {sequence(comma, first)}" + (f" | {tail}" if optional and tail else "")
        )
        can_be_empty = optional and (at == len(pairs) - 1 or tail.endswith("?"))
        head = f"{name}_head_{at}" + ("?" if can_be_empty else "")
        tail = f"{name}_tail_{at}" + ("?" if can_be_empty else "")
    return head, lines


class _Gemma:
    def __init__(self, root: Mapping[str, Any], name: str, token_id: TokenId, *, is_strict: bool) -> None:
        self.lines: list[str] = []
        self._root, self._name, self._token_id, self._is_strict = root, name, token_id, is_strict
        self._count = 0
        self._references: dict[str, str] = {}
        self._any = ""

    def object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties") or {}
        if not properties:
            return quoted("{}") if schema.get("additionalProperties") is False else self._any_object()
        pairs = [(sequence(quoted(f"{key}:"), self._value(inner)), key) for key, inner in properties.items()]
        inside, lines = listed(pairs, set(schema.get("required", ())), self._fresh(), quoted(","))
        self.lines += lines
        return f'"{{" {inside} "}}"'

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything()
        self._check(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return "(" + " | ".join(self._literal(value) for value in values) + ")"
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return "(" + " | ".join(self._value(one) for one in schema[key]) + ")"
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return "(" + " | ".join(self._value({**schema, "type": kind}) for kind in kinds) + ")"
        match kinds:
            case "string":
                return self._string()
            case "object":
                return self.object(schema)
            case "array":
                item = self._value(schema.get("items", True))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "integer" | "number" | "boolean" | "null":
                kept = {key: value for key, value in schema.items() if key in _NUMERIC | {"type"}}
                return json_value(kept, lenient=not self._is_strict)
        return self._anything()

    def _check(self, schema: Mapping[str, Any]) -> None:
        limits = _NUMERIC if schema.get("type") in ("integer", "number") else set()
        unknown = sorted(schema.keys() - _WORDS - limits)
        if unknown and self._is_strict:
            raise InvalidRequest(
                f"tools: {unknown[0]!r} in the schema of a strict tool cannot be enforced in this model's "
                "notation; take it out, or strict",
                param="tools",
            )

    def _reference(self, target: str) -> str:
        known = self._references.get(target)
        if known is not None:
            return known
        name = self._references[target] = self._fresh()
        found: Any = self._root
        for part in target.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if not target.startswith("#/") or found is None:
            raise InvalidRequest(f"tools: $ref {target!r:.80} points nowhere in its schema", param="tools")
        self.lines.append(f"{name}: {self._value(found)}")
        return name

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({sequence(self._quote(), text(value), self._quote())})"
        return quoted(json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def _string(self) -> str:
        return f"({sequence(self._quote(), '/[^<]*/', self._quote())})"

    def _quote(self) -> str:
        return text(QUOTE, self._token_id)

    def _any_object(self) -> str:
        pair = f'/[A-Za-z_][A-Za-z0-9_.\\-]*/ ":" {self._anything()}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _anything(self) -> str:
        if not self._any:
            self._any = self._fresh()
            plain = json_value({"type": ["number", "boolean", "null"]})
            items = f'"[" ({self._any} ("," {self._any})*)? "]"'
            self.lines.append(f"{self._any}: {self._string()} | {plain} | {items} | {self._any_object()}")
        return self._any

    def _fresh(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"
