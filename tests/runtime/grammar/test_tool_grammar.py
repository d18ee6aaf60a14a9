"""Grammars of tool calls: what each model family writes is taken, and what its reader reads back is right."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.grammar_compiler import BadGrammar, GrammarCompiler
from ostinato.runtime.grammar.grammar_spec import GrammarSpec
from ostinato.runtime.grammar.lark_text import json_value
from ostinato.runtime.grammar.tool_grammar import FORMATS, tool_call_grammar
from ostinato.runtime.output.offline import parse_tool_calls
from tests.support import toy_text

MARKERS = [
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]",
    "<minimax:tool_call>", "</minimax:tool_call>",
    "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
]  # fmt: skip
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 9},
        "b": {"type": "string"},
        "c": {"type": "array", "items": {"enum": ["x", "y z"]}},
    },
    "required": ["b"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD}},
    {"type": "function", "function": {"name": "now.utc-1"}},
]
NAMED = {"type": "function", "function": {"name": "add"}}

# one call of `add` with {"a": 1, "b": "q", "c": ["y z"]}, then one of `now.utc-1`; and two wrong ones
GOOD = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b":"q", "c": ["y z"]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now.utc-1", "arguments": {}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a":1,"b":"q","c":["y z"]}}, '
    '{"name": "now.utc-1", "arguments": {}}]',
    "phi": '<|tool_call|>[{"name": "add", "arguments": {"a":1,"b":"q","c":["y z"]}}, '
    '{"name": "now.utc-1", "arguments": {}}]<|/tool_call|>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a":1,"b":"q","c":["y z"]}}, '
    '{"name": "now.utc-1", "arguments": {}}]',
    "llama3_json": '{"name": "add", "parameters": {"a":1,"b":"q","c":["y z"]}}; '
    '{"name": "now.utc-1", "parameters": {}}',
    "pythonic": '[add(a=1, b="q", c=["y z"]), now.utc-1()]',
    "gemma4": '<|tool_call>call:add{a:1,b:<|"|>q<|"|>,c:[<|"|>y z<|"|>]}<tool_call|>'
    "<|tool_call>call:now.utc-1{}<tool_call|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a":1,"b":"q","c":["y z"]}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now.utc-1\n```json\n"
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=b>\nq\n</parameter>\n<parameter=c>\n["y z"]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now.utc-1>\n</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">q</parameter>\n<parameter name="c">["y z"]</parameter>\n</invoke>\n'
    '<invoke name="now.utc-1">\n</invoke>\n</minimax:tool_call>',
    "gpt_oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1,"b":"q","c":["y z"]}<|call|>',
}
FREE = dict.fromkeys(FORMATS, "some text") | {"gpt_oss": "<|channel|>final<|message|>some text"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = toy_text.tokenizer()
    made.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return made


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("tools") / "tokenizer.json"
    tokenizer.save(str(path))
    return GrammarCompiler(path, 512, (1,))


def taken(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str | None, text: str) -> str:
    """`whole`, `part` or `no`."""
    assert grammar is not None
    matcher = compiler.compile(GrammarSpec("grammar", grammar))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if matcher.try_consume_tokens(ids) < len(ids):
        return "no"
    return "whole" if matcher.is_accepting() else "part"


@pytest.mark.parametrize("family", FORMATS)
def test_calls_are_taken_as_the_family_writes_them(
    compiler: GrammarCompiler, tokenizer: Tokenizer, family: str
):
    def grammar(choice: Any, *, parallel: bool = True) -> str | None:
        made = tool_call_grammar(TOOLS, choice, family, token_id=tokenizer.token_to_id, parallel=parallel)
        return made

    both = GOOD[family]
    wrong = both.replace("y z", "y w")
    for choice in ("required", "auto"):
        assert taken(compiler, tokenizer, grammar(choice), both) == "whole"
        assert taken(compiler, tokenizer, grammar(choice), wrong) == "no"
        assert taken(compiler, tokenizer, grammar(choice), both.replace("add", "del")) == "no"
    assert taken(compiler, tokenizer, grammar("required"), FREE[family]) == "no"
    assert taken(compiler, tokenizer, grammar("required"), "") == "part"
    assert taken(compiler, tokenizer, grammar("auto"), FREE[family]) == "whole"
    if family == "gpt_oss":  # its answer ends with the first call
        assert taken(compiler, tokenizer, grammar(NAMED), both) == "whole"
        return
    assert taken(compiler, tokenizer, grammar(NAMED), both) == "no"
    assert taken(compiler, tokenizer, grammar("required", parallel=False), both) == "no"
    assert taken(compiler, tokenizer, grammar("auto", parallel=False), both) == "no"


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("strict", [True, False])
def test_calls_or_the_json_that_the_answer_must_be_without_them(
    compiler: GrammarCompiler, tokenizer: Tokenizer, family: str, strict: bool
):
    content = json_value({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    tools = TOOLS if strict else [{"function": {**tool["function"], "strict": None}} for tool in TOOLS]

    def grammar(choice: Any, *, parallel: bool = True) -> str | None:
        return tool_call_grammar(
            tools, choice, family, token_id=tokenizer.token_to_id, parallel=parallel, content=content
        )

    final = "<|channel|>final<|message|>" if family == "gpt_oss" else ""
    calls, free = GOOD[family], grammar("auto")
    assert taken(compiler, tokenizer, free, calls) == "whole"
    assert taken(compiler, tokenizer, free, calls.replace("y z", "y w")) == "no"
    assert taken(compiler, tokenizer, free, final + '{"ok": true}') == "whole"
    assert taken(compiler, tokenizer, free, final + '{"ok": 1}') == "no"
    assert taken(compiler, tokenizer, free, final + '{"ok": true}' + calls) == "no"
    assert taken(compiler, tokenizer, free, FREE[family]) == "no"
    assert taken(compiler, tokenizer, grammar("required"), final + '{"ok": true}') == "no"
    if family != "gpt_oss":
        assert taken(compiler, tokenizer, grammar("auto", parallel=False), calls) == "no"


def test_a_keyword_that_cannot_be_enforced_is_named_without_the_grammar_around_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
):
    wrong = {"type": "object", "properties": {"x": {"uniqueItems": True}}}
    strict = [{"function": {"name": "f", "strict": True, "parameters": wrong}}]
    for tools, content in ((strict, None), (TOOLS, json_value(wrong))):
        grammar = tool_call_grammar(tools, "auto", "hermes", token_id=tokenizer.token_to_id, content=content)
        with pytest.raises(BadGrammar) as caught:
            compiler.compile(GrammarSpec("grammar", grammar or ""))
        assert str(caught.value) == (
            'Unimplemented keys: ["uniqueItems"]; take them out, or give "strict": false to have them ignored'
        )


def test_json_that_resembles_a_call_without_a_marker_is_still_possible(
    compiler: GrammarCompiler, tokenizer: Tokenizer
):
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
    grammar = tool_call_grammar(
        TOOLS, "auto", "llama3_json", token_id=tokenizer.token_to_id, content=json_value(named)
    )
    for text, result in {
        '{"name": "Bob"}': "whole",
        '{"name": "addition"}': "whole",
        '{"name": "add"}': "whole",
        '{"name": "now.utc-1", "parameters": {}}': "whole",
        '{"name": "add", "parameters": {"b": 1}}': "no",
        '{"name": "Bob", "parameters": {}}': "no",
    }.items():
        assert taken(compiler, tokenizer, grammar, text) == result, text


@pytest.mark.parametrize("family", FORMATS)
def test_what_the_grammar_takes_is_what_the_reader_reads(family: str):
    calls = parse_tool_calls(GOOD[family], family, tools=["add", "now.utc-1"]).calls
    assert calls[0].name == "add"
    assert calls[0].arguments == {"a": 1, "b": "q", "c": ["y z"]}
    assert [call.name for call in calls[1:]] == ([] if family == "gpt_oss" else ["now.utc-1"])


def test_arguments_of_gemma_nest_refer_and_leave_out(compiler: GrammarCompiler, tokenizer: Tokenizer):
    tree = {
        "type": "object",
        "$defs": {
            "n": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
        },
        "properties": {
            "x": {"type": ["number", "null"]},
            "tree": {"$ref": "#/$defs/n"},
            "any": {},
            "flag": {"anyOf": [{"type": "boolean"}, {"const": "maybe"}]},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": tree}}]
    grammar = tool_call_grammar(tools, "required", "gemma4", token_id=tokenizer.token_to_id)
    q = '<|"|>'
    for inside, result in {
        "": "whole",
        "x:null": "whole",
        "x:1.5,flag:true": "whole",
        f"flag:{q}maybe{q}": "whole",
        f"flag:{q}no{q}": "no",
        "tree:{kids:[{kids:[]},{}]}": "whole",  # no key is needed
        "tree:{kids:[{kids:[]}]},any:{a-b:[1,{}]}": "whole",
        "flag:true,x:1": "no",  # in the schema's order
    }.items():
        text = f"<|tool_call>call:f{{{inside}}}<tool_call|>"
        assert taken(compiler, tokenizer, grammar, text) == result, inside


VALUES: list[
    tuple[dict[str, Any], str, str, object]
] = [  # schema of `x`, what is written, verdict, what is read
    ({"type": "string"}, "5", "whole", "5"),
    ({"type": "string"}, "a <b>\n</c> {", "whole", "a <b>\n</c> {"),
    ({"type": "string"}, "", "whole", ""),
    ({"type": "string", "enum": ["x", "y z"]}, "y z", "whole", "y z"),
    ({"type": "string", "enum": ["x", "y z"]}, "y", "no", None),
    ({"type": "string", "const": "1"}, "1", "whole", "1"),
    ({"enum": ["1", 2]}, '"1"', "whole", "1"),  # as JSON, for the schema has no type
    ({"enum": ["1", 2]}, "2", "whole", 2),
    ({"type": "integer", "minimum": 3}, "4", "whole", 4),
    ({"type": "integer", "minimum": 3}, "2", "no", None),
    ({"type": "boolean"}, "True", "no", None),
    ({"type": ["string", "null"]}, "null", "whole", None),
    ({"type": ["string", "null"]}, '"5"', "whole", "5"),
    (
        {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
        "[1, 2.5]",
        "whole",
        [1, 2.5],
    ),
    ({"$ref": "#/$defs/p"}, '{"q": [true]}', "whole", {"q": [True]}),
    ({"$ref": "#/$defs/p"}, '{"q": true}', "no", None),
]
OBJECT = {"type": "object", "properties": {"q": {"type": "array"}}, "required": ["q"]}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("family", ["qwen3_xml", "minimax"])
def test_tagged_values_have_the_types_of_their_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, family: str, strict: bool
):
    for schema, written, verdict, value in VALUES:
        parameters = {
            "type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"p": OBJECT},
        }  # fmt: skip
        tools = [{"function": {"name": "add", "strict": strict, "parameters": parameters}}]
        grammar = tool_call_grammar(tools, "required", family, token_id=tokenizer.token_to_id)
        call = {
            "qwen3_xml": f"<tool_call>\n<function=add>\n<parameter=x>\n{written}\n</parameter>\n</function>\n"
            "</tool_call>",
            "minimax": '<minimax:tool_call>\n<invoke name="add">\n'
            f'<parameter name="x">{written}</parameter>\n</invoke>\n</minimax:tool_call>',
        }[family]
        assert taken(compiler, tokenizer, grammar, call) == verdict, (schema, written)
        if verdict == "whole":
            (read,) = parse_tool_calls(call, family, tools={"add": parameters}, strict=True).calls
            assert read.arguments == {"x": value}


def test_tagged_texts_among_other_types_are_plain_only_where_the_tool_is_not_strict(
    compiler: GrammarCompiler, tokenizer: Tokenizer
):
    def verdict(strict: bool, call: str) -> str:
        parameters = {"properties": {"x": {"type": ["string", "null"]}, "y": {}}}
        tools = [{"function": {"name": "f", "strict": strict, "parameters": parameters}}]
        grammar = tool_call_grammar(tools, "required", "qwen3_xml", token_id=tokenizer.token_to_id)
        return taken(
            compiler, tokenizer, grammar, f"<tool_call>\n<function=f>\n{call}</function>\n</tool_call>"
        )

    for strict in (True, False):
        assert verdict(strict, "") == "whole"  # nothing is required
        assert verdict(strict, "<parameter=y>\n[1]\n</parameter>\n") == "whole"
        assert verdict(strict, "<parameter=y>\n1\n</parameter>\n<parameter=x>\nnull\n</parameter>\n") == "no"
    assert verdict(False, "<parameter=x>\nParis\n</parameter>\n") == "whole"
    assert verdict(True, "<parameter=x>\nParis\n</parameter>\n") == "no"


@pytest.mark.parametrize("family", ["qwen3_xml", "minimax"])
def test_limits_of_a_tagged_text_are_refused_if_strict_and_ignored_if_not(family: str):
    function: dict[str, Any] = {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}},
    }
    assert tool_call_grammar([{"function": function}], "required", family, token_id=lambda _: None)
    with pytest.raises(InvalidRequest, match="'pattern' of 'a', a text of a strict tool") as caught:
        tool_call_grammar(
            [{"function": {**function, "strict": True}}], "required", family, token_id=lambda _: None
        )
    assert caught.value.param == "tools"


def test_nothing_is_made_where_nothing_is_to_be_enforced():
    loose = [{"type": "function", "function": {"name": "f", "parameters": ADD}}]
    for tools, choice in ((loose, "auto"), (TOOLS, "none"), ([], "auto")):
        assert tool_call_grammar(tools, choice, "hermes", token_id=lambda _: None) is None


def test_what_cannot_be_done_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="tool_choice: a call cannot be forced") as caught:
        tool_call_grammar(TOOLS, "required", "unheard", token_id=lambda _: None)
    assert caught.value.param == "tool_choice"
    with pytest.raises(InvalidRequest, match="'g' is not among"):
        tool_call_grammar(TOOLS, {"function": {"name": "g"}}, "hermes", token_id=lambda _: None)
    strict = {
        "name": "f",
        "strict": True,
        "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}},
    }
    with pytest.raises(InvalidRequest, match="'pattern' in the schema of a strict tool") as caught:
        tool_call_grammar([{"function": strict}], "required", "gemma4", token_id=lambda _: None)
    assert caught.value.param == "tools"


def test_markers_that_are_no_tokens_are_written_out(tmp_path: Path):
    plain = toy_text.tokenizer()
    plain.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", 512, (1,))
    for choice in ("required", "auto"):
        grammar = tool_call_grammar(TOOLS, choice, "hermes", token_id=plain.token_to_id)
        assert taken(compiler, plain, grammar, GOOD["hermes"]) == "whole"


ARGUMENTS_OF_THEIR_OWN = ("gemma4", "pythonic", "qwen3_xml", "minimax")
NO_SCHEMAS: list[dict[str, Any]] = [
    {"properties": ["a"]},
    {"properties": None},
    {"properties": {"a": 5}},
    {"properties": {"a": {"type": 5}}},
    {"properties": {"a": {"type": ["string", 5]}}},
    {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"enum": []}}},
    {"properties": {"a": {"anyOf": {}}}},
    {"properties": {"a": {"anyOf": [5]}}},
    {"properties": {"a": {"$ref": 5}}},
    {"properties": {"a": {"items": 5}}},
    {"properties": {"a": {"properties": {"b": {}}, "required": 3}}},
    {"properties": {"a": {}}, "required": [["a"]]},
    {"properties": {"a": {}}, "required": None},
    {"properties": {"a": {}}, "$defs": 5},
]


@pytest.mark.parametrize("name", ARGUMENTS_OF_THEIR_OWN)
@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=str)
def test_parameters_that_are_no_schema_are_refused_by_the_name_of_their_tool(name: str, schema: Any):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidRequest, match="tools: the parameters of 'f' are no JSON schema: ") as caught:
        tool_call_grammar([tool], "required", name, token_id=lambda text: None)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("gemma4", "a:b"), ("gemma4", '"a'), ("pythonic", "a=b"), ("qwen3_xml", "a>b"), ("minimax", 'a"b')]
    + [(name, wrong) for name in ARGUMENTS_OF_THEIR_OWN for wrong in ("", " a")],
)
def test_a_parameter_that_the_notation_cannot_name_is_refused(name: str, parameter: str):
    for depth in range(2 if name == "gemma4" else 1):
        schema: dict[str, Any] = {"properties": {parameter: {"type": "string"}}}
        for _ in range(depth):
            schema = {"properties": {"outer": {"type": "object", **schema}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(InvalidRequest, match="cannot be named in this model's notation"):
            tool_call_grammar([tool], "required", name, token_id=lambda text: None)


@pytest.mark.parametrize("name", ARGUMENTS_OF_THEIR_OWN)
def test_a_tool_that_forbids_all_arguments_gets_none(name: str):
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "now.utc-1", "parameters": parameters}}
    same = {"type": "function", "function": {"name": "now.utc-1", "parameters": {**parameters, "title": "x"}}}
    free = {"type": "function", "function": {"name": "now.utc-1", "parameters": {"type": "object"}}}
    made, again, other = (
        tool_call_grammar([one], "required", name, token_id=lambda text: None) for one in (tool, same, free)
    )
    assert made == again
    assert (made == other) == (name == "pythonic")  # which writes none in any case
