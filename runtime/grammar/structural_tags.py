"""Structural tags: free text in which a trigger begins one of several tags, each with an inside of its own.

    {"structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}

as in vLLM's `response_format` of type `structural_tag`. A tag's `begin` starts with one of the triggers. The
newer notation, a `format` instead of both, is read by `tag_formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.lark_text import TokenId, is_token, json_value, quoted, sequence, text
from ostinato.runtime.grammar.tag_formats import format_grammar

MAX_TAGS = 256
_KEYS = {"type", "structures", "triggers"}


class Tag(NamedTuple):
    """One tag; `trigger` is a beginning of `begin`."""

    trigger: str
    begin: str
    inside: str  # a right-hand side in Lark
    end: str


def structural_tag_grammar(wanted: Mapping[str, Any], param: str, token_id: TokenId | None = None) -> str:
    """Lark of a whole answer by either notation. Raises InvalidRequest that says where it is wrong."""
    if "format" not in wanted:
        return tags_grammar(read_tags(wanted, param), token_id=token_id)
    for other in sorted(wanted.keys() - {"type", "format"}):
        raise InvalidRequest(f"{param}.{other}: has no place beside format", param=param)
    return format_grammar(wanted["format"], param, token_id=token_id)


def read_tags(wanted: Mapping[str, Any], param: str) -> list[Tag]:
    """Tags of a request. Raises InvalidRequest that says where it is wrong."""

    def refuse(place: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"{param}.{place}: {what}", param=param)

    unknown = sorted(wanted.keys() - _KEYS)
    if unknown:
        raise refuse(unknown[0], 'is not supported; give "structures" and "triggers", or "format" alone')
    structures, triggers = wanted.get("structures"), wanted.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise refuse("triggers", "give a list of texts, none of them empty")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise refuse("structures", f"give a list of 1 to {MAX_TAGS} tags")
    tags = []
    for at, one in enumerate(structures):
        place = f"structures[{at}]"
        if not isinstance(one, Mapping) or one.keys() - {"begin", "schema", "end"}:
            raise refuse(place, "a tag is an object of begin, schema and end")
        begin, schema, end = one.get("begin"), one.get("schema", True), one.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise refuse(place, "begin and end must be texts")
        if not isinstance(schema, Mapping | bool):
            raise refuse(f"{place}.schema", f"a JSON schema is an object; got {type(schema).__name__}")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise refuse(f"{place}.begin", f"{begin!r:.60} begins with none of the triggers")
        tags.append(Tag(trigger, begin, json_value(schema), end))
    return tags


def tags_grammar(
    tags: Sequence[Tag], *, token_id: TokenId | None = None, at_least: int = 0, at_most: int | None = None
) -> str:
    """Text with tags in it, in Lark. `at_least` and `at_most` count tags; behind the last comes free text."""
    by_trigger: dict[str, list[Tag]] = {}
    for tag in tags:
        by_trigger.setdefault(tag.trigger, []).append(tag)
    rules = []
    for at, (trigger, group) in enumerate(by_trigger.items()):
        bodies = [
            sequence(text(tag.begin[len(trigger) :], token_id), tag.inside, text(tag.end, token_id))
            for tag in group
        ]
        if is_token(trigger, token_id):
            rules.append(f"group_{at}: TEXT {text(trigger, token_id)} ({' | '.join(bodies)})")
        else:
            rules.append(f"trigger_{at}[lazy]: TEXT {quoted(trigger)}")
            rules.append(f"group_{at}: trigger_{at} ({' | '.join(bodies)})")
    upper = "" if at_most is None else str(at_most)
    head = [
        f"start: group{{{at_least},{upper}}} rest",
        "group: " + " | ".join(f"group_{at}" for at in range(len(by_trigger))),
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    return "\n".join([*head, *rules, ""])
