"""Grammars are compiled or refused in words; cases B57. Kept within bounds."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.grammar import grammar_compiler
from ostinato.runtime.grammar.grammar_compiler import BadGrammar, GrammarCompiler
from ostinato.runtime.grammar.grammar_spec import GrammarSpec
from ostinato.runtime.grammar.lark_text import json_value
from tests.support.grammar_runs import ids_of, toy_compiler


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return toy_compiler(tmp_path_factory.mktemp("toy"))


def schema(value: Any, *, lenient: bool = False) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value), lenient)


def accepts(compiler: GrammarCompiler, spec: GrammarSpec, text: str) -> bool:
    """Whether the whole text is a complete answer."""
    matcher, ids = compiler.compile(spec), ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


BAD = [
    (schema({"type": "object", "properties": {"foo": "bar"}}), 'properties.foo: got "bar"; give an object'),
    (schema({"type": "objekt"}), 'type: got "objekt"; types are string, number'),
    (schema({"items": {"type": "strng"}}, lenient=True), 'items.type: got "strng"; types are'),
    (schema({"properties": {"type": {"type": 5}}}), "properties.type.type: got 5; types are"),
    (
        GrammarSpec("grammar", 'start: "a" ' + json_value({"anyOf": [{}, {"type": "strng"}]}) + "\n"),
        'anyOf[1].type: got "strng"',
    ),
    (schema({"type": "string", "pattern": "([a-z"}), "regex parse error"),
    (schema({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
    (schema({"type": "array", "uniqueItems": True}), 'uniqueItems"]; take them out, or give "strict": false'),
    (schema({"not": {"type": "string"}}), "not"),
    (schema({"if": {}, "then": {}}), "if"),
    (schema({"type": "array", "contains": {}}), "contains"),
    (schema({"type": "string", "format": "smell"}), "Unknown format: smell"),
    (schema({"type": "string", "pattern": "^(?=a)b"}), "look-around"),
    (schema(False), "Unsatisfiable"),
    (GrammarSpec("regex", "(a"), "unclosed group"),
    (GrammarSpec("grammar", "start: foo"), 'unknown name: "foo"'),
    (GrammarSpec("grammar", "root ::= foo"), "Rule 'foo' not found"),
    (GrammarSpec("grammar", ""), ""),
]


@pytest.mark.parametrize(("spec", "words"), BAD, ids=[spec.text[:40] for spec, _ in BAD])
def test_wrong_grammars_are_refused_in_words_and_not_kept(
    compiler: GrammarCompiler, spec: GrammarSpec, words: str
):
    before = compiler.num_kept
    with pytest.raises(BadGrammar) as caught:
        compiler.compile(spec)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600
    assert compiler.num_kept == before
    assert compiler.find(spec) is None


GOOD: list[tuple[GrammarSpec, str, str]] = [
    (schema({"type": "integer", "minimum": 3, "maximum": 3}), "3", "4"),
    (schema({"type": "integer", "multipleOf": 7}), "21", "22"),
    (
        schema({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, lenient=True),
        "[1,1]",
        "[a]",
    ),
    (schema({"type": "object", "patternProperties": {"^a": {"type": "null"}}}), '{"ab":null}', '{"ab":1}'),
    (schema({"enum": ["grüße", 1, None]}), '"grüße"', '"x"'),
    (schema(True), '[1, {"a": "b"}]', "[1"),
    (schema({"type": "object"}), '{\n  "a": 1\n}', '{   \n\n\n\n"a":1}'),
    (GrammarSpec("regex", "[0-9]{4}-[0-9]{2}"), "2024-01", "2024-1"),
    (GrammarSpec("grammar", 'start: "a" b\nb: /[0-9]+/ | "(" b ")"'), "a((1))", "a((1)"),
    (GrammarSpec("grammar", 'root ::= "x" [0-9]+ | "y"'), "x12", "z"),
]


@pytest.mark.parametrize(("spec", "good", "bad"), GOOD, ids=[spec.text[:40] for spec, _, _ in GOOD])
def test_right_grammars_take_what_they_describe(
    compiler: GrammarCompiler, spec: GrammarSpec, good: str, bad: str
):
    assert accepts(compiler, spec, good)
    assert not accepts(compiler, spec, bad)


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"], "additionalProperties": False}
    return made


BOMBS = [
    schema(nested(200)),
    schema({"enum": [f"w{i}_{i * 7}" for i in range(12000)]}),
    schema({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
    schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}
    ),
    GrammarSpec("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    GrammarSpec("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    GrammarSpec("regex", "((((((a?){99}){99}){99}){99}){99}){99}b"),
]


@pytest.mark.parametrize("spec", BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_refused_or_compiled_in_seconds(compiler: GrammarCompiler, spec: GrammarSpec):
    began = time.process_time()
    try:
        matcher = compiler.compile(spec)
    except BadGrammar:
        pass
    else:
        for _ in range(20):
            bits = matcher.compute_bitmask()
            token = next(
                (8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1), 1
            )
            if matcher.is_error() or not matcher.consume_token(token):
                break
    assert time.process_time() - began < 5


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT", 3)
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT_BYTES", 100)
    compiler = toy_compiler(tmp_path)
    specs = [GrammarSpec("regex", "a" * (1 + at)) for at in range(4)]
    for spec in specs[:3]:
        compiler.compile(spec)
    assert compiler.find(specs[0]) is not None  # used again
    compiler.compile(specs[3])
    assert [compiler.find(spec) is not None for spec in specs] == [True, False, True, True]
    compiler.compile(GrammarSpec("regex", "b" * 99))
    assert compiler.num_kept == 1


def test_matchers_of_one_grammar_are_apart(compiler: GrammarCompiler):
    spec = GrammarSpec("regex", "ab")
    first, second = compiler.compile(spec), compiler.compile(spec)
    assert first.consume_token(ids_of("a")[0])
    assert second.consume_token(ids_of("a")[0])
    assert not compiler.compile(spec).is_accepting()


def test_a_model_without_tokenizer_says_so(tmp_path: Path):
    with pytest.raises(BadGrammar, match="no tokenizer"):
        GrammarCompiler(tmp_path / "tokenizer.json", 512, (1,)).compile(GrammarSpec("regex", "a"))
