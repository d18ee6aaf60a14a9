"""Arguments of tool calls that are written between tags: Qwen3-Coder's and MiniMax's, from the tool's schema.

    qwen3_xml    <parameter=city>\\nParis\\n</parameter>\\n
    minimax      <parameter name="city">Paris</parameter>\\n

The text has no types: a value is text as it is where the schema says "string" and nothing else, and JSON in
all other places, as the reader takes it (`runtime/output/xml_formats.py`). Where a string is one of several
types, a strict tool's value is JSON, with quotes; another tool's may be plain text, too.
Arguments come in the schema's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.call_arguments import listed
from ostinato.runtime.grammar.lark_text import json_value, quoted, sequence, text
from ostinato.runtime.output.xml_formats import value_types


class Tags(NamedTuple):
    """What stands around the key and the value of an argument."""

    begin: str
    middle: str
    end: str


TAGS = {
    "qwen3_xml": Tags("<parameter=", ">\n", "\n</parameter>\n"),
    "minimax": Tags('<parameter name="', '">', "</parameter>\n"),
}
_ENDS_TEXT = "</parameter>"  # wherever it stands
_LIMITS = ("pattern", "minLength", "maxLength", "format")  # of a text that is not JSON


def tagged_arguments(
    schema: Mapping[str, Any], name: str, parser_format: str, *, is_strict: bool
) -> tuple[str, list[str]]:
    """A right-hand side, and the rules that it needs. InvalidRequest for what cannot be enforced."""
    tags = TAGS[parser_format]
    plain, lines = f"{name}_text", [f"{name}_text[lazy]: /(.|\\n)*/ {quoted(_ENDS_TEXT)}"]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    behind_text = text(tags.end.partition(_ENDS_TEXT)[2])
    properties = schema.get("properties") or {}
    if not properties and schema.get("additionalProperties") is False:
        return "", []
    if not properties:
        pair = sequence(quoted(tags.begin), '/[^<>"\\n]+/', quoted(tags.middle), plain, behind_text)
        return f"({pair})*", lines
    pairs = []
    for key, value in properties.items():
        kinds = value_types(schema, key)
        inner = {**value, **shared} if isinstance(value, Mapping) else value
        as_json = sequence(json_value(inner, lenient=not is_strict), quoted(tags.end))
        if kinds == {"string"}:
            written = _text_value(inner, key, tags, plain, behind_text, is_strict=is_strict)
        elif "string" in kinds and not is_strict:
            written = f"({as_json} | {sequence(plain, behind_text)})"
        else:
            written = as_json
        pairs.append((sequence(quoted(f"{tags.begin}{key}{tags.middle}"), written), key))
    inside, rules = listed(pairs, set(schema.get("required", ())), name, "")
    return inside, lines + rules


def _text_value(
    value: Mapping[str, Any], key: str, tags: Tags, plain: str, behind_text: str, *, is_strict: bool
) -> str:
    known = value["enum"] if "enum" in value else [value["const"]] if "const" in value else None
    if texts := [one for one in known or () if isinstance(one, str)]:
        return "(" + " | ".join(quoted(one + tags.end) for one in texts) + ")"
    limit = next((one for one in _LIMITS if one in value), None)
    if limit is not None and is_strict:
        raise InvalidRequest(
            f"tools: {limit!r} of {key!r:.60}, a text of a strict tool, cannot be enforced in this model's "
            "notation; take it out, or strict",
            param="tools",
        )
    return sequence(plain, behind_text)
