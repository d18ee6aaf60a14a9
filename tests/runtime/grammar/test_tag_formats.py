"""Structural tags as a tree of formats: what each allows, and what is refused by its place."""

import re
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.grammar_compiler import BadGrammar, GrammarCompiler
from ostinato.runtime.grammar.grammar_spec import read_grammar
from ostinato.runtime.grammar.tag_formats import format_grammar
from ostinato.runtime.messages import SamplingParams
from tests.support.grammar_runs import ids_of, toy_compiler

Format = dict[str, Any]


def schema(inner: object) -> Format:
    return {"type": "json_schema", "json_schema": inner}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


TEXT: Format = {"type": "any_text"}
ADD: Format = {"begin": "<f=add>", "content": schema({"type": "integer"}), "end": "</f>"}
SAY: Format = {"type": "tag", "begin": "<f=say>", "content": TEXT, "end": "</f>"}
TRIGGERED: Format = {"type": "triggered_tags", "triggers": ["<f"], "tags": [ADD, SAY]}
LISTED: Format = {"type": "tags_with_separator", "tags": [ADD, SAY], "separator": ", "}
ONE, FIRST = {"at_least_one": True}, {"stop_after_first": True}
THOUGHT: Format = {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"}
ANSWER: Format = {
    "type": "or",
    "elements": [const("yes"), regex(r"[0-9]+/[0-9]"), schema({"type": "object"})],
}
ALLOWED: list[tuple[Format, list[str], list[str]]] = [
    (const("a\"b"), ['a"b'], ["", 'a"', 'a"bc']),
    (TEXT, ["", "a\nb < c"], []),
    (regex(r"a\/b|c/d|e\nf|\\"), ["a/b", "c/d", "e\nf", "\\"], ["a/", "b", "ab"]),
    (regex("x\ny"), ["x\ny"], ["xy", "xny"]),
    (TRIGGERED, ["", "hi", "a <f=add>3</f> b<f=say>x < y</f>"], ["<f=", "<f=sub>", "<f=add>x</f>"]),
    ({**TRIGGERED, **ONE}, ["a<f=add>3</f>b", "<f=say></f><f=add>1</f>"], ["", "hi"]),
    ({**TRIGGERED, **FIRST}, ["hi", "a<f=add>3</f>"], ["<f=add>3</f>b"]),
    ({**TRIGGERED, **ONE, **FIRST}, ["a<f=add>3</f>"], ["hi", "<f=add>3</f>b"]),
    (LISTED, ["", "<f=add>1</f>", "<f=add>1</f>, <f=say>a, b</f>"], ["x", "<f=add>1</f><f=say></f>", ", "]),
    ({**LISTED, **ONE, "separator": ""}, ["<f=add>1</f><f=add>2</f>"], [""]),
    ({**LISTED, **FIRST}, ["", "<f=add>1</f>"], ["<f=add>1</f>, <f=add>2</f>"]),
    (
        {"type": "sequence", "elements": [THOUGHT, ANSWER, TEXT]},
        ["<think>a\n< b</think>yes", "<think></think>12/3 tail", "<think>x</think>{} "],
        ["yes", "<think>x</think>no", "x<think></think>yes"],
    ),
    ({"type": "tag", "begin": "> ", "content": TEXT, "end": ""}, ["> ", "> said"], ["said"]),
    ({**TRIGGERED, "excludes": []}, ["hi"], ["<f="]),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return toy_compiler(tmp_path_factory.mktemp("tags"))


def accepts(compiler: GrammarCompiler, wanted: Format, text: str) -> bool:
    """Whether a text is a whole answer."""
    spec = read_grammar(SamplingParams(structural_tag={"type": "structural_tag", "format": wanted}))
    assert spec is not None
    matcher = compiler.compile(spec)
    tokens = ids_of(text)
    return matcher.validate_tokens(tokens) == len(tokens) and (
        not tokens or matcher.consume_tokens(tokens)
    ) and matcher.is_accepting()  # fmt: skip


@pytest.mark.parametrize(("wanted", "good", "bad"), ALLOWED, ids=range(len(ALLOWED)))
def test_a_format_allows_what_it_says(
    compiler: GrammarCompiler, wanted: Format, good: list[str], bad: list[str]
):
    assert [text for text in good if not accepts(compiler, wanted, text)] == []
    assert [text for text in bad if accepts(compiler, wanted, text)] == []


WRONG: list[tuple[object, str]] = [
    (7, "format.type: give one of const_string, "),
    ({"type": "grammar", "grammar": "x"}, "format.type: give one of"),
    ({"type": "qwen_xml_parameter"}, "format.type: give one of"),
    (const(""), "format.value: give a text"),
    (regex(""), "format.pattern: give a text"),
    (schema("integer"), "format.json_schema: a JSON schema is an object; got str"),
    ({**TEXT, "excludes": ["a"]}, "format.excludes: is not supported in any_text"),
    ({"type": "sequence", "elements": []}, "format.elements: give a list of 1 to 256"),
    ({"type": "sequence", "elements": [const("a")] * 257}, "format.elements: give a list of 1 to 256"),
    ({"type": "sequence", "elements": [TEXT, const("a")]}, "format.elements[0]: any_text ends the answer"),
    ({"type": "or", "elements": [const("a"), {}]}, "format.elements[1].type: give one of"),
    ({"type": "sequence", "elements": [TRIGGERED, const("a")]}, "format.elements[0]: triggered_tags end"),
    ({**TRIGGERED, "triggers": [""]}, "format.triggers: give a list of texts"),
    ({**TRIGGERED, "triggers": ["<g"]}, "format.tags[0].begin: '<f=add>' begins with none"),
    ({**TRIGGERED, "tags": [{**ADD, "schema": {}}]}, "format.tags[0].schema: is not supported in a tag"),
    (
        {**TRIGGERED, "tags": [{**ADD, "type": "regex"}]},
        "format.tags[0]: a tag is an object of begin, content",
    ),
    ({**TRIGGERED, "at_least_one": "no"}, "format.at_least_one: give true or false; got 'no'"),
    ({**SAY, "content": {"type": "or", "elements": [TEXT]}}, "format.content.elements[0]: any_text ends"),
    ({**TRIGGERED, "tags": [{**ADD, "end": ["a"]}]}, "format.tags[0].end: give a text"),
    ({**TRIGGERED, "tags": [{**ADD, "content": None}]}, "format.tags[0].content.type: give one of"),
    ({**LISTED, "separator": 1}, "format.separator: give a text"),
]


@pytest.mark.parametrize(("wanted", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_is_refused_by_its_place(wanted: object, words: str):
    with pytest.raises(InvalidRequest, match=rf"^rf\.{re.escape(words)}") as caught:
        format_grammar(wanted, "rf")
    assert caught.value.param == "rf"


def test_formats_in_each_other_without_end_are_refused():
    wanted = const("a")
    for _ in range(2000):
        wanted = {"type": "or", "elements": [wanted]}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        format_grammar(wanted, "rf")


def test_a_wrong_expression_or_schema_is_refused_when_it_is_compiled(compiler: GrammarCompiler):
    for wanted in (regex("("), regex("a\\"), schema({"type": "objekt"}), schema({"uniqueItems": True})):
        with pytest.raises(BadGrammar):
            accepts(compiler, wanted, "")


def test_markers_that_are_tokens_are_named_as_such(tmp_path: Path):
    def token_id(marker: str) -> int | None:
        return {"<|call|>": 7, "<|end|>": 8}.get(marker)

    tag = {"begin": "<|call|>f", "content": TEXT, "end": "<|end|>"}
    wanted = {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [tag]}
    made = format_grammar(wanted, "rf", token_id=token_id)
    assert 'part_1: "f" TEXT <[8]>' in made
    assert "part_2: TEXT <[7]> (part_1)" in made
