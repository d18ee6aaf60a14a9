"""What shape an answer must have, as a text: of a JSON schema, a regular expression, a grammar, of tags.

    response_format  {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}} or
                     {"type": "structural_tag", ...}; {"type": "text"} asks for nothing
    json_schema      the same as response_format's json_schema with strict=true, for short
    regex, choice    the whole answer matches, or is one of the texts
    grammar          Lark, in llguidance's dialect, or GBNF (recognised by `::=`)
    structural_tag   text in which tags, once begun, have a given inside (`structural_tags.py`)

A schema whose keywords cannot all be enforced is refused, unless strict=false: then those are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.lark_text import json_value, one_of, quoted, regex
from ostinato.runtime.grammar.structural_tags import structural_tag_grammar
from ostinato.runtime.messages import SamplingParams

MAX_GRAMMAR_BYTES = 256 << 10  # an enum of 20 000 words, 300 KiB, compiles in 66 ms
FIELDS = ("response_format", "json_schema", "regex", "choice", "grammar", "structural_tag")

Kind = Literal["json_schema", "regex", "grammar", "tags"]


class GrammarSpec(NamedTuple):
    """A grammar, before it is compiled. Equal ones are compiled once."""

    kind: Kind
    text: str  # schema and tags as JSON
    lenient: bool = False  # what cannot be enforced of a schema is ignored


def has_grammar(sampling: SamplingParams) -> bool:
    """Whether `read_grammar` gives one; cheap, and raises nothing."""
    if sampling.response_format is not None and sampling.response_format.get("type") != "text":
        return True
    return any(getattr(sampling, name) is not None for name in FIELDS[1:])


def grammar_param(sampling: SamplingParams) -> str:
    """The field that users know the grammar by."""
    if sampling.grammar_param:
        return sampling.grammar_param
    return next((name for name in FIELDS if getattr(sampling, name) is not None), "response_format")


def read_grammar(sampling: SamplingParams) -> GrammarSpec | None:
    """What the answer must look like; None: anything. Raises InvalidRequest that names the field."""
    if not has_grammar(sampling):
        return None
    given = [name for name in FIELDS if getattr(sampling, name) is not None]
    if sampling.response_format is not None and sampling.response_format.get("type") == "text":
        given.remove("response_format")
    param = grammar_param(sampling)
    if len(given) > 1:
        second = given[1]
        raise InvalidRequest(f"{second}: contradicts {given[0]}; give one of the two", param=second)
    spec = _read(given[0], sampling, param)
    size = len(spec.text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param}: {size} bytes; at most {MAX_GRAMMAR_BYTES} are compiled",
            param=param,
        )
    return spec


def json_content(sampling: SamplingParams) -> str | None:
    """Lark of the JSON that a `response_format` asks for: what an answer says when it makes no calls.

    None for other grammars, which are about the whole answer. Raises as `read_grammar`.
    """
    spec = read_grammar(sampling)
    if spec is None or spec.kind != "json_schema" or grammar_param(sampling) != "response_format":
        return None
    return json_value(json.loads(spec.text), lenient=spec.lenient)


def answer_content(sampling: SamplingParams) -> str | None:
    """What a grammar allows, as a part of a rule: JSON, an expression, one of several texts.

    None for grammars and tags, which have rules of their own. Raises as `read_grammar`.
    """
    spec = read_grammar(sampling)
    if spec is None:
        return None
    if spec.kind == "json_schema":
        return json_value(json.loads(spec.text), lenient=spec.lenient)
    if spec.kind == "regex" and spec.text:
        return regex(spec.text)
    return f"({' | '.join(map(quoted, sampling.choice))})" if sampling.choice else None


def _read(name: str, sampling: SamplingParams, param: str) -> GrammarSpec:
    if name == "regex":
        return GrammarSpec("regex", sampling.regex or "")
    if name == "grammar":
        return GrammarSpec("grammar", sampling.grammar or "")
    if name == "choice":
        texts = sampling.choice or ()
        if not texts or not all(texts):
            raise InvalidRequest(f"{param}: give at least one text, and no empty one", param=param)
        return GrammarSpec("grammar", one_of(texts))
    if name == "json_schema":
        return GrammarSpec("json_schema", _schema_text(sampling.json_schema, param))
    if name == "structural_tag":
        return _tags(sampling.structural_tag or {}, param)
    return _response_format(sampling.response_format or {}, param)


def _response_format(wanted: Mapping[str, Any], param: str) -> GrammarSpec:
    kind = wanted.get("type")
    if kind == "json_object":
        return GrammarSpec("json_schema", '{"type":"object"}')
    if kind == "structural_tag":
        return _tags(wanted, param)
    if kind != "json_schema":
        raise InvalidRequest(
            f"{param}.type: got {kind!r:.60}; must be text, json_object, json_schema or structural_tag",
            param=param,
        )
    inner = wanted.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise InvalidRequest(
            f'{param}.json_schema: give {{"name": ..., "schema": {{...}}}}; there is no schema', param=param
        )
    return GrammarSpec("json_schema", _schema_text(inner["schema"], param), inner.get("strict") is False)


def _tags(wanted: Mapping[str, Any], param: str) -> GrammarSpec:
    structural_tag_grammar(wanted, param)
    return GrammarSpec("tags", _json(wanted, param))


def _schema_text(schema: object, param: str) -> str:
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{param}: a JSON schema is an object; got {type(schema).__name__}", param=param)
    return _json(schema, param)


def _json(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: not JSON: {error}", param=param) from None
