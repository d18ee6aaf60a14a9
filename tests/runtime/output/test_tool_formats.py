"""Tool calls of every format: the same events for every cut, and what each format's texts mean."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.output.events import CallStart, Content
from ostinato.runtime.output.registry import tool_format, tool_names
from tests.support.parsed_text import calls, content, cut, events, parser
from tests.support.spelled_calls import (
    D_CALLS,
    FRONT_ONLY,
    HARD,
    NAMES,
    SPELL,
    THREE,
    TWO,
    every_cut,
)


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
