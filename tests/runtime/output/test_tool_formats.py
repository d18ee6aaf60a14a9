"""Tool calls of every format: the same events for every cut, and what each format's texts mean."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.output.events import CallEnd, CallStart, Content
from ostinato.runtime.output.registry import tool_format, tool_names
from tests.support.parsed_text import calls, content, cut, events, parser

D_CALLS, D_CALL, D_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
D_CALL_END, D_CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

Call = tuple[str, dict]


def as_objects(made: list[Call], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in made]


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def pythonic(made: list[Call]) -> str:
    one = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in made)
    return "[" + ", ".join(one) + "]"


def tags(name: str, arguments: dict, call: str, call_end: str, parameter: str, line: str) -> str:
    def value(one: object) -> str:
        return one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)

    pairs = [
        f"{parameter.format(key)}{line}{value(one)}{line}</parameter>\n" for key, one in arguments.items()
    ]
    return f"{call.format(name)}\n{''.join(pairs)}{call_end}"


nl = "\n"
SPELL: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda made: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in as_objects(made)),
    "granite": lambda made: "<|tool_call|>[" + ", ".join(as_objects(made)) + "]",
    "phi": lambda made: "functools[" + ", ".join(as_objects(made)) + "]",
    "llama3_json": lambda made: "; ".join(as_objects(made, "parameters")),
    "mistral": lambda made: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in made),
    "gemma4": lambda made: "".join(
        f"<|tool_call>call:{name}{gemma(args)}<tool_call|>" for name, args in made
    ),
    "pythonic": pythonic,
    "deepseek_v3": lambda made: D_CALLS + "\n".join(
        f"{D_CALL}function{D_SEP}{name}\n```json\n{json.dumps(args)}\n```{D_CALL_END}" for name, args in made
    ) + D_CALLS_END,
    "qwen3_xml": lambda made: "\n".join(
        f"<tool_call>\n{tags(name, args, '<function={}>', '</function>', '<parameter={}>', nl)}\n</tool_call>"
        for name, args in made
    ),
    "minimax": lambda made: "<minimax:tool_call>\n" + "\n".join(
        tags(name, args, '<invoke name="{}">', "</invoke>", '<parameter name="{}">', "")
        for name, args in made
    ) + "\n</minimax:tool_call>",
    "gpt_oss": lambda made: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}<|call|>"
        for name, args in made
    ),
}  # fmt: skip
FRONT_ONLY = {"llama3_json", "pythonic"}  # calls without a marker
TWO: list[Call] = [("f", {"city": 42}), ("g", {"city": -7})]
THREE: list[Call] = [*TWO, ("now", {})]
HARD = {
    "text": "a, b} ]{ \"q\" 'p' \\ </tool_call> <tool_call> \n ü😀 ```",
    "n": 9007199254740993,
    "deep": {"list": [1, -2.5, True, False, None, {"x": []}], "empty": {}},
    "zero": 0, "no": False, "none": "", "nothing": None,
}  # fmt: skip
STRING = {"type": "string"}
NAMES = {
    "f": {"properties": {"city": {"type": ["string", "integer"]}}},
    "g": {}, "now": {}, "switch": {"properties": {"s": STRING, "v": {"anyOf": [STRING, {"type": "null"}]}}},
    "a.b-c_1": {"properties": {"text": STRING, "none": STRING}},
}  # fmt: skip


def every_cut(name: str, text: str, *, prefix_cuts: int = 1) -> list:
    """Events of `text`, after checking that they are the same for cuts in two, single characters, none."""
    whole = events(parser(None, name, tools=NAMES), [text])
    assert events(parser(None, name, tools=NAMES), list(text)) == whole
    for at in range(1, len(text), prefix_cuts):
        assert events(parser(None, name, tools=NAMES), [text[:at], text[at:]]) == whole, at
    return whole


def test_every_format_is_tested_here():
    assert set(SPELL) == set(tool_names())


@pytest.mark.parametrize("name", SPELL)
def test_two_calls_and_a_tail_come_out_of_every_cut(name: str):
    found = every_cut(name, SPELL[name](TWO) + " ok")
    assert calls(found) == [("f", '{"city":42}'), ("g", '{"city":-7}')]
    assert content(found) == " ok"


@pytest.mark.parametrize("name", SPELL)
def test_a_third_call_without_arguments_has_an_empty_object(name: str):
    found = every_cut(name, SPELL[name](THREE))
    assert calls(found)[2] == ("now", "{}")
    assert content(found) == ""


@pytest.mark.parametrize("name", SPELL)
def test_a_call_without_arguments_between_two_others_survives_every_cut_in_three(name: str):
    """Case B47."""
    text = SPELL[name]([TWO[0], ("now", {}), TWO[1]])
    found = every_cut(name, text)
    assert calls(found) == [("f", '{"city":42}'), ("now", "{}"), ("g", '{"city":-7}')]
    for first in range(1, len(text), 13):
        for second in range(first + 1, len(text), 7):
            pieces = [text[:first], text[first:second], text[second:]]
            assert events(parser(None, name, tools=NAMES), pieces) == found, (first, second)


@pytest.mark.parametrize("name", SPELL)
def test_hard_values_survive(name: str):
    hard = {key: value for key, value in HARD.items() if key != "text"} if name == "pythonic" else HARD
    ((called, arguments),) = calls(every_cut(name, SPELL[name]([("a.b-c_1", hard)]), prefix_cuts=7))
    assert (called, json.loads(arguments)) == ("a.b-c_1", hard)


@pytest.mark.parametrize("name", sorted(SPELL))
def test_text_in_front_of_calls_is_content_without_the_white_space_between(name: str):
    if name in FRONT_ONLY:
        text = f"  \n{SPELL[name](TWO)}\n"
        assert content(every_cut(name, text)) == ""
        said = f"I say {SPELL[name](TWO)}"
        assert (calls(every_cut(name, said)), content(every_cut(name, said))) == ([], said)
        return
    front = "<|channel|>final<|message|>I look.\n\n<|end|>" if name == "gpt_oss" else "I look.\n\n"
    found = every_cut(name, front + SPELL[name](TWO))
    assert (content(found), len(calls(found))) == ("I look.", 2)


@pytest.mark.parametrize("name", SPELL)
def test_a_call_that_breaks_off_gives_a_prefix_of_its_arguments(name: str):
    text = SPELL[name]([("f", {"city": "Tokyo", "n": [1, 2]})])
    whole = '{"city":"Tokyo","n":[1,2]}'
    for end in range(1, len(text)):
        found = events(parser(None, name, tools=NAMES), [text[:end]])
        for called, arguments in calls(found):
            assert called == "f"
            assert whole.startswith(arguments), (text[:end], arguments)
        if calls(found):
            assert content(found) == ""


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", SPELL)
def test_any_text_gives_the_same_events_for_any_cut(name: str, data: st.DataObject):
    """Also for texts that break the format, and then nothing is lost of what is no call."""
    form = tool_format(name)
    scraps = [*form.markers, *SPELL[name](TWO).replace("{", " { ").split(" "), SPELL[name](THREE)]
    scraps += ["{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "call:", "f", "text ", "<", '{"name":"f"']
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=8)))
    places = data.draw(st.lists(st.integers(0, 200), max_size=6))
    whole = events(parser(None, name, tools=NAMES), [text])
    assert events(parser(None, name, tools=NAMES), cut(text, places)) == whole
    assert events(parser(None, name, tools=NAMES), list(text)) == whole
    calls(whole)
    if not form.is_special and all(isinstance(one, Content) for one in whole):
        assert content(whole) == text


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


def test_a_marker_in_pieces_never_shows_and_a_near_miss_shows_whole():
    call = SPELL["deepseek_v3"]([("get_weather", {"city": "Tokyo"})])
    pieces = [D_CALLS[:4], D_CALLS[4:9], call[9:]]
    found = events(parser(None, "deepseek_v3"), pieces)
    assert (calls(found), content(found)) == ([("get_weather", '{"city":"Tokyo"}')], "")
    near = ["<｜tool", "▁box", " then plain text"]
    made = parser(None, "deepseek_v3")
    shown = [content(made.push(piece)) for piece in near] + [content(made.finish())]
    assert shown == ["", "<｜tool▁box", " then plain text", ""]
    assert content(events(parser(None, "deepseek_v3"), ["price ", "<"])) == "price <"


@pytest.mark.parametrize("name", ["deepseek_v3", "hermes", "gemma4", "mistral"])
def test_a_marker_inside_a_string_stays_there(name: str):
    for marker in tool_format(name).markers:
        if name == "gemma4" and "|>" in marker and '"' in marker:
            continue  # its quote marker ends a string by definition
        found = every_cut(name, SPELL[name]([("f", {"x": f"a {marker} b"})]), prefix_cuts=5)
        ((_, arguments),) = calls(found)
        assert json.loads(arguments) == {"x": f"a {marker} b"}


@pytest.mark.parametrize(
    "text",
    ["<tool_call> no call </tool_call> text", "<tool_call>{}</tool_call>", "<tool_call>[1, 2]",
     "a <tool_call", '<tool_call>{"nam', "</tool_call> alone",
     '<tool_call>{"arguments": {"a": 1}}</tool_call>'],
)  # fmt: skip
def test_what_is_no_call_is_content_word_for_word(text: str):
    assert every_cut("hermes", text) == [Content(text)]


def test_an_answer_in_json_is_no_call():
    for text in ('{"name": "John", "age": 3}', '{"city": "Rome"}', '{"name": "f", "age": 3}', "{}", "[1, 2]"):
        assert every_cut("llama3_json", text) == [Content(text)]
        assert every_cut("pythonic", text) == [Content(text)]
    unknown = '{"name": "rm", "parameters": {}}'
    assert every_cut("llama3_json", unknown) == [Content(unknown)]
    made = parser(None, "llama3_json")
    assert calls(events(made, [unknown])) == [("rm", "{}")]  # tools are not known: the form alone decides


def test_gemma_keys_and_words():
    text = '<|tool_call>call:f{<|"|>a b<|"|>:1,"c":"d",e:word,x-y.z: true }call:g{}<tool_call|>'
    assert calls(every_cut("gemma4", text)) == [
        ("f", '{"a b":1,"c":"d","e":"word","x-y.z":true}'),
        ("g", "{}"),
    ]


def test_python_literals_become_json():
    text = r"""[f(a='it\'s', b="q\"\x41\u00fc\n", d={'k': [True, None, -1.5e3]}, e=Red)]"""
    ((_, arguments),) = calls(every_cut("pythonic", text))
    assert json.loads(arguments) == {
        "a": "it's", "b": 'q"Aü\n', "d": {"k": [True, None, -1500.0]}, "e": "Red"
    }  # fmt: skip


def test_ids_are_unique_and_mistral_s_have_nine_characters():
    for name in ("hermes", "mistral"):
        made = parser(None, name)
        ids = [one.id for one in made.push(SPELL[name](THREE)) if isinstance(one, CallStart)]
        assert len(set(ids)) == 3
        if name == "mistral":
            assert all(len(one) == 9 and one.isalnum() for one in ids)
        else:
            assert all(one.startswith("call_") for one in ids)


def test_types_of_values_in_tags_come_from_the_schema_or_else_from_their_look():
    values = {"s": "42", "v": "null", "n": "42", "w": "word", "t": "true", "o": '{"a": [1, NaN]}'}
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=switch>\n{pairs}</function>\n</tool_call>"
    ((_, arguments),) = calls(every_cut("qwen3_xml", text, prefix_cuts=3))
    assert json.loads(arguments) == {
        "s": "42", "v": None, "n": 42, "w": "word", "t": True, "o": '{"a": [1, NaN]}'
    }  # fmt: skip


def test_a_long_string_in_tags_is_passed_on_as_it_comes():
    made = parser(None, "qwen3_xml", tools=NAMES)
    made.push("<tool_call>\n<function=switch>\n<parameter=s>\n")
    pieces = [calls_text(made.push(piece)) for piece in ("one", " two\n", "three\n", "</parameter>")]
    assert pieces == ["one", " two", "\\nthree", '"']


def calls_text(found: list) -> str:
    return "".join(one.text for one in found)
