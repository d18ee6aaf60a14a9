"""Structural tags as a tree of formats, xgrammar's newer way to write them, which vLLM takes too.

    {"type": "triggered_tags", "triggers": ["<f"], "at_least_one": true,
     "tags": [{"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}

    const_string        value
    json_schema         json_schema
    regex               pattern
    any_text            any text; the last thing of the answer, or right in front of a tag's end
    sequence, or        elements: one after another, or one of them
    tag                 begin, content, end
    triggered_tags      text in which a trigger begins one of the tags; the last thing of the answer
    tags_with_separator tags and nothing else

`at_least_one` and `stop_after_first` count tags. Free text cannot stand elsewhere: where it ends would be
anybody's guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.lark_text import TokenId, is_token, json_value, quoted, regex, sequence, text

MAX_PARTS = 256  # of one list
_COUNTS = {"at_least_one", "stop_after_first"}
_KEYS: dict[str, set[str]] = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "any_text": set(),
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags"} | _COUNTS,
    "tags_with_separator": {"tags", "separator"} | _COUNTS,
}


def format_grammar(wanted: object, param: str, *, token_id: TokenId | None = None) -> str:
    """The grammar of a whole answer, in Lark. Raises InvalidRequest that says where it is wrong."""
    rules = _Rules(param, token_id)
    try:
        start = rules.of(wanted, "format", ends=True)
    except RecursionError:
        raise InvalidRequest(f"{param}.format: is nested too deeply", param=param) from None
    return "\n".join([f"start: {start}", *rules.lines, r"TEXT: /(.|\n)*/", ""])


class _Rules:
    def __init__(self, param: str, token_id: TokenId | None) -> None:
        self._param, self._token_id = param, token_id
        self.lines: list[str] = []
        self._count = 0

    def of(self, wanted: object, place: str, *, ends: bool) -> str:
        """What a format allows, as a part of a rule. `ends`: nothing follows, so it may be free text."""
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        if not isinstance(wanted, Mapping) or not isinstance(kind, str) or kind not in _KEYS:
            raise self._refuse(f"{place}.type", f"give one of {', '.join(_KEYS)}")
        for key in sorted(wanted.keys() - _KEYS[kind] - {"type"}):
            if wanted[key]:  # `excludes` and its like, where they ask for nothing
                raise self._refuse(f"{place}.{key}", f"is not supported in {kind}")
        for key in sorted(wanted.keys() & _COUNTS):
            if not isinstance(wanted[key], bool | None):
                raise self._refuse(f"{place}.{key}", f"give true or false; got {wanted[key]!r:.60}")
        match kind:
            case "const_string":
                return text(self._text(wanted, "value", place), self._token_id)
            case "json_schema":
                return self._rule(json_value(self._schema(wanted, place)))
            case "regex":
                return self._rule(regex(self._text(wanted, "pattern", place)), terminal=True)
            case "any_text":
                if not ends:
                    raise self._refuse(place, "any_text ends the answer, or is the content of a tag")
                return "TEXT"
            case "sequence":
                elements = self._list(wanted, "elements", place)
                last = len(elements) - 1
                return sequence(
                    *(
                        self.of(one, f"{place}.elements[{at}]", ends=ends and at == last)
                        for at, one in enumerate(elements)
                    )
                )
            case "or":
                elements = self._list(wanted, "elements", place)
                one_of = [
                    self.of(one, f"{place}.elements[{at}]", ends=ends) for at, one in enumerate(elements)
                ]
                return self._rule(" | ".join(one_of))
            case "tag":
                return self._tag(wanted, place, self._text(wanted, "begin", place), ends=ends)
            case "tags_with_separator":
                return self._separated(wanted, place)
            case _:
                if not ends:
                    raise self._refuse(place, "triggered_tags end the answer, with the text behind them")
                return self._triggered(wanted, place)

    def _tag(self, wanted: Mapping[str, Any], place: str, begin: str, *, ends: bool = False) -> str:
        """A tag from `begin` on, which may be the rest of its own."""
        end = wanted.get("end", "")
        if not isinstance(end, str):
            raise self._refuse(f"{place}.end", "give a text")
        content = wanted.get("content")
        if end and isinstance(content, Mapping) and content.get("type") == "any_text":
            self.of(content, f"{place}.content", ends=True)
            if is_token(end, self._token_id):
                inside = sequence("TEXT", text(end, self._token_id))
            else:
                inside = self._rule(f"TEXT {quoted(end)}", lazy=True)
        else:
            inside = sequence(
                self.of(content, f"{place}.content", ends=ends and not end), text(end, self._token_id)
            )
        return self._rule(sequence(text(begin, self._token_id), inside))

    def _separated(self, wanted: Mapping[str, Any], place: str) -> str:
        tags = [
            self._tag(one, where, self._text(one, "begin", where)) for where, one in self._tags(wanted, place)
        ]
        separator = wanted.get("separator", "")
        if not isinstance(separator, str):
            raise self._refuse(f"{place}.separator", "give a text")
        tag = self._rule(" | ".join(tags))
        more = (
            "" if wanted.get("stop_after_first") else f"({sequence(text(separator, self._token_id), tag)})*"
        )
        return f"({sequence(tag, more)}){'' if wanted.get('at_least_one') else '?'}"

    def _triggered(self, wanted: Mapping[str, Any], place: str) -> str:
        triggers = self._list(wanted, "triggers", place)
        if not all(isinstance(one, str) and one for one in triggers):
            raise self._refuse(f"{place}.triggers", "give a list of texts, none of them empty")
        by_trigger: dict[str, list[str]] = {}
        for where, one in self._tags(wanted, place):
            begin = self._text(one, "begin", where)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise self._refuse(f"{where}.begin", f"{begin!r:.60} begins with none of the triggers")
            by_trigger.setdefault(trigger, []).append(self._tag(one, where, begin[len(trigger) :]))
        groups = []
        for trigger, tags in by_trigger.items():
            if is_token(trigger, self._token_id):
                head = sequence("TEXT", text(trigger, self._token_id))
            else:
                head = self._rule(f"TEXT {quoted(trigger)}", lazy=True)
            groups.append(f"{head} ({' | '.join(tags)})")
        group = self._rule(" | ".join(groups))
        low = 1 if wanted.get("at_least_one") else 0
        if wanted.get("stop_after_first"):
            return group if low else f"({group} | TEXT)"
        return f"{group}{{{low},}} TEXT"

    def _tags(self, wanted: Mapping[str, Any], place: str) -> list[tuple[str, Mapping[str, Any]]]:
        tags = []
        for at, one in enumerate(self._list(wanted, "tags", place)):
            where = f"{place}.tags[{at}]"
            if not isinstance(one, Mapping) or one.get("type", "tag") != "tag":
                raise self._refuse(where, "a tag is an object of begin, content and end")
            for key in sorted(one.keys() - _KEYS["tag"] - {"type"}):
                raise self._refuse(f"{where}.{key}", "is not supported in a tag")
            tags.append((where, one))
        return tags

    def _schema(self, wanted: Mapping[str, Any], place: str) -> Mapping[str, Any] | bool:
        schema = wanted.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise self._refuse(
                f"{place}.json_schema", f"a JSON schema is an object; got {type(schema).__name__}"
            )
        return schema

    def _text(self, wanted: Mapping[str, Any], key: str, place: str) -> str:
        value = wanted.get(key)
        if not isinstance(value, str) or not value:
            raise self._refuse(f"{place}.{key}", "give a text that is not empty")
        return value

    def _list(self, wanted: Mapping[str, Any], key: str, place: str) -> list[Any]:  # Any: of a request
        value = wanted.get(key)
        if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
            raise self._refuse(f"{place}.{key}", f"give a list of 1 to {MAX_PARTS}")
        return value

    def _rule(self, right: str, *, terminal: bool = False, lazy: bool = False) -> str:
        self._count += 1
        name = f"{'RE' if terminal else 'part'}_{self._count}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {right}")
        return name

    def _refuse(self, place: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param}.{place}: {what}", param=self._param)
