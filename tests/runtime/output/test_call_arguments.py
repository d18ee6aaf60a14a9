"""Arguments of calls in every format: missing ones, ended ones, and types that nobody repairs."""

import json

import pytest

from ostinato.runtime.output.events import CallEnd, Content
from tests.support.parsed_text import calls, content, events, parser
from tests.support.spelled_calls import (
    D_CALL,
    D_CALL_END,
    D_CALLS,
    D_CALLS_END,
    D_SEP,
    NAMES,
    SPELL,
    every_cut,
)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name":"switch","arguments":{}}', "{}"),
        ('{"name":"switch"}', "{}"),
        ('{"name":"switch","arguments":null}', "{}"),
        ('{"name":"switch","arguments":{ }}', "{}"),
        ('{"arguments":{},"name":"switch"}', "{}"),
        ('{"name":"switch","arguments":""}', "{}"),
        ('{"name":"switch","arguments":{"x":0}}', '{"x":0}'),
        ('{"name":"switch","arguments":{"x":false}}', '{"x":false}'),
        ('{"name":"switch","arguments":{"x":""}}', '{"x":""}'),
        ('{"name":"switch","arguments":{"x":[]}}', '{"x":[]}'),
        ('{"arguments":{"x": 9007199254740993},"id":7,"name":"switch"}', '{"x":9007199254740993}'),
        ('{"name":"switch","arguments":"{\\"x\\": 1}"}', '{"x":1}'),
        ('{"name":"switch","arguments":{"x":"two\nlines"}}', '{"x":"two\\nlines"}'),
        ('{"name":"switch","arguments":{"x":1}}}', '{"x":1}'),
    ],
)
def test_missing_empty_and_falsy_arguments(written: str, arguments: str):
    assert calls(every_cut("hermes", f"<tool_call>\n{written}\n</tool_call>")) == [("switch", arguments)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:switch{}<tool_call|>"),
        ("llama3_json", '{"name":"switch","parameters":{}}'),
        ("llama3_json", '<|python_tag|>{"type":"function","name":"switch","parameters":{}}<|eom_id|>'),
        ("deepseek_v3", f"{D_CALLS}{D_CALL}function{D_SEP}switch\n```json\n{{}}\n```{D_CALL_END}"),
        ("deepseek_v3", f"{D_CALL}switch{D_SEP}{{}}{D_CALL_END}"),
        ("mistral", '[TOOL_CALLS] [{"name": "switch", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]switch{}"),
        ("mistral", "[TOOL_CALLS]switch[CALL_ID]a1b2c3d4e[ARGS]{}"),
        ("phi", '<|tool_call|>[{"name": "switch", "arguments": {}}]<|/tool_call|>'),
        ("granite", '<tool_call>[{"name": "switch", "arguments": {}}]'),
        ("pythonic", "<|python_start|>[switch()]<|python_end|>"),
        ("gpt_oss", "<|channel|>commentary to=functions.switch<|message|>{}<|call|>"),
        ("gpt_oss", "<|start|>assistant to=functions.switch<|channel|>commentary json<|message|>{}"),
        ("gpt_oss", "<|channel|>commentary to=functions.switch<|message|><|call|>"),
        ("gpt_oss", "<|channel|>commentary to=functions.switch<|message|> <|end|>"),
        ("deepseek_v3", f"{D_CALL}switch{D_SEP}{D_CALL_END}{D_CALLS_END}"),
        ("deepseek_v3", f"{D_CALLS}{D_CALL}function{D_SEP}switch\n```json\n\n```{D_CALL_END}"),
        ("qwen3_xml", "<tool_call><function=switch></function></tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name="switch"></invoke></minimax:tool_call>'),
        ("pythonic", "[switch( )]"),
        ("gemma4", "<|tool_call>call:switch{ }<tool_call|>"),
    ],
)
def test_other_spellings_of_a_call_without_arguments(name: str, text: str):
    found = every_cut(name, text)
    assert (calls(found), content(found)) == ([("switch", "{}")], "")


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>{}</tool_call>"), ("llama3_json", "{}"), ("granite", "<tool_call>[{}]"),
        ("phi", "<|tool_call|>[{}]<|/tool_call|>"), ("mistral", "[TOOL_CALLS] [{}]"),
    ],
)  # fmt: skip
def test_every_json_format_reads_no_arguments_as_an_empty_object(name: str, text: str, key: str):
    """Case B07."""
    for said, arguments in (
        ("", "{}"), (f',"{key}":null', "{}"), (f',"{key}":""', "{}"), (f',"{key}":{{ }}', "{}"),
        (f',"{key}":{{"x":0}}', '{"x":0}'), (f',"{key}":{{"x":[]}}', '{"x":[]}'),
    ):  # fmt: skip
        found = every_cut(name, text.replace("{}", f'{{"name":"switch"{said}}}'))
        assert (calls(found), content(found)) == ([("switch", arguments)], "")
    early = text.replace("{}", f'{{"{key}":{{}},"name":"switch"}}')
    assert calls(every_cut(name, early)) == [("switch", "{}")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt_oss", "<|channel|>commentary to=functions.switch <|constrain|>json<|message|>"),
        ("deepseek_v3", f"{D_CALLS}{D_CALL}switch{D_SEP}"),
        ("mistral", "[TOOL_CALLS]switch[ARGS]"),
        ("hermes", '<tool_call>{"name": "switch", "arguments": '),
    ],
)
def test_a_call_that_the_model_ends_before_its_arguments_has_none_and_one_that_is_cut_has_nothing(
    name: str, text: str
):
    """The token that ends a call of gpt-oss is an EOS, which the text does not have."""
    for pieces in ([text], list(text)):
        for by_itself, arguments in ((True, "{}"), (False, "")):
            made = parser(None, name, tools=NAMES)
            found = [one for piece in pieces for one in made.push(piece)]
            found += made.finish(by_itself=by_itself)
            assert calls(found) == [("switch", arguments)]
            assert isinstance(found[-1], CallEnd)
            assert found[-1].whole == by_itself


def test_tags_that_the_model_leaves_out_around_a_call_are_not_missed():
    inside = "<function=switch>\n<parameter=s>\nx\n</parameter>\n"
    for text in (
        f"{inside}</function>\n</tool_call>",
        f"{inside}</function>",
        f"{inside}</tool_call>",
        f"<tool_call>\n{inside}</tool_call>",
    ):
        found = every_cut("qwen3_xml", text)
        assert (calls(found), content(found)) == ([("switch", '{"s":"x"}')], "")
    two = every_cut("qwen3_xml", f"I look. {inside}</function>\n<function=now>\n</function> ok")
    assert (calls(two), content(two)) == ([("switch", '{"s":"x"}'), ("now", "{}")], "I look. ok")
    invoke = '<minimax:tool_call><invoke name="switch"><parameter name="s">x</parameter></minimax:tool_call>'
    assert calls(every_cut("minimax", invoke)) == [("switch", '{"s":"x"}')]
    for text in (
        "a <function=other>\n</function>",
        "a <function=",
        "<function=a b> <function=\n",
        "<function",
    ):
        assert every_cut("qwen3_xml", text) == [Content(text)]
    for by_itself, arguments in ((True, '{"s":"x"}'), (False, '{"s":"x"')):
        made = parser(None, "qwen3_xml", tools=NAMES)
        assert calls(made.push(f"<tool_call>\n{inside}") + made.finish(by_itself=by_itself)) == [
            ("switch", arguments)
        ]


@pytest.mark.parametrize("written", ["null", "none at all, {sorry}", "7"])
def test_a_marker_behind_arguments_that_are_no_object_is_no_part_of_them(written: str):
    told = "{}" if written == "null" else written
    for name, text in (
        ("gpt_oss", f"<|channel|>commentary to=functions.switch<|message|>{written}<|call|>"),
        ("gpt_oss", f"<|channel|>commentary to=functions.switch<|message|>{written}"),
        ("deepseek_v3", f"{D_CALL}switch{D_SEP}{written}{D_CALL_END}"),
        ("deepseek_v3", f"{D_CALL}function{D_SEP}switch\n```json\n{written}\n```{D_CALL_END}"),
    ):
        found = every_cut(name, text)
        assert (calls(found), content(found)) == ([("switch", told)], "")


def test_arguments_are_as_the_model_wrote_them_whatever_a_schema_says():
    """No type is repaired: a repair would come after its beginning was sent."""
    for arguments in ('{"a":"42","b":"x","c":"true"}', '{"b":"x","a":"42"}', '{"a":"x"}', '{"b":"42"}'):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert calls(every_cut("hermes", text)) == [("f", arguments)]


KINDS: list[dict[str, str]] = [{"a": "integer", "b": "string", "c": "boolean"}, {}]
SCHEMAS = [
    *({"properties": {key: {"type": kind} for key, kind in kinds.items()}} for kinds in KINDS),
    {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "b": {"type": "string"}}},
    {"properties": "no object"},
    {"properties": {"a": True, "b": {"type": ["string", 7]}}},
]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "gemma4", "deepseek_v3", "qwen3_xml", "minimax"])
@pytest.mark.parametrize("order", ["abc", "bac", "bca"])
def test_types_are_not_repaired_once_a_beginning_was_sent(name: str, order: str):
    """Case B09: texts stay texts where the notation has types; tags have none: there the schema decides."""
    written = {"a": "42", "b": "x", "c": "true"}
    text = SPELL[name]([("f", {key: written[key] for key in order})])
    for schema in (*SCHEMAS, None):
        tools = {"g": {}} if schema is None else {"f": schema}
        whole = events(parser(None, name, tools=tools), [text])
        for pieces in (list(text), *([text[:at], text[at:]] for at in range(1, len(text), 5))):
            assert events(parser(None, name, tools=tools), pieces) == whole
        if name == "llama3_json" and schema is None:
            assert calls(whole) == []  # without a marker only the tools' names make a call
            continue
        ((_, arguments),) = calls(whole)
        tagged = {"a": 42, "b": "x", "c": True}
        assert json.loads(arguments) == (tagged if name in ("qwen3_xml", "minimax") else written)
