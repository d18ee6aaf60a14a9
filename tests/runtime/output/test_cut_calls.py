"""Answers with calls that a grammar has made, cut anywhere: the beginning of a call is no content."""

import pytest

from ostinato.runtime.output.answer import Enforced
from ostinato.runtime.output.events import Content, Event, join
from ostinato.runtime.output.registry import tool_format
from tests.support.parsed_text import calls, content, events, parser
from tests.support.spelled_calls import FRONT_ONLY, NAMES, SPELL, TWO

OLD_MISTRAL = (
    '[TOOL_CALLS][{"name": "f", "arguments": {"city": 42}}, {"name": "g", "arguments": {"city": -7}}]'
)
PHI_TOKENS = OLD_MISTRAL.replace("[TOOL_CALLS]", "<|tool_call|>") + "<|/tool_call|>"
WRITTEN = [
    *((name, spell(TWO)) for name, spell in SPELL.items()),
    ("mistral", OLD_MISTRAL),
    ("phi", PHI_TOKENS),
]
FORMATS = pytest.mark.parametrize(("name", "text"), WRITTEN, ids=[f"{n}-{t[:9]}" for n, t in WRITTEN])
WHOLE = [("f", '{"city":42}'), ("g", '{"city":-7}')]


def cut(name: str, text: str, enforced: Enforced, *, step: int = 1) -> list[tuple[str, list[Event]]]:
    """Beginnings of `text` with their events, which are the same however the text comes."""
    found = []
    for end in range(0, len(text) + 1, step):
        begun = text[:end]
        whole = events(parser(None, name, tools=NAMES, enforced=enforced), [begun])
        assert events(parser(None, name, tools=NAMES, enforced=enforced), list(begun)) == whole, begun
        made = calls(whole)
        assert [one for one, _ in made] == ["f", "g"][: len(made)]
        for (_, got), (_, expected) in zip(made, WHOLE, strict=False):
            assert expected.startswith(got), begun
        found.append((begun, whole))
    assert calls(whole) == WHOLE
    return found


def is_cut_marker(name: str, text: str) -> bool:
    """A marker of several tokens that is not there yet: nobody knows what it becomes."""
    return any(start.startswith(text) and start != text for start in tool_format(name).starts)


@FORMATS
def test_where_there_are_calls_and_nothing_else_no_cut_leaves_content(name: str, text: str):
    for begun, found in cut(name, text, Enforced.CALLS):
        assert content(found) == "", begun


@FORMATS
def test_a_call_in_text_that_is_begun_and_cut_is_no_content(name: str, text: str):
    said = "" if name in FRONT_ONLY or name == "gpt_oss" else "Let me look.\n"
    for begun, found in cut(name, said + text, Enforced.BEGUN):
        rest = content(found).removeprefix(said.strip()).strip()
        assert rest == "" or said.startswith(begun) or is_cut_marker(name, rest), begun


@FORMATS
def test_calls_in_place_of_json_that_are_cut_are_no_content(name: str, text: str):
    for begun, found in cut(name, text, Enforced.FRONT):
        said = content(found)
        # what begins without a marker may be JSON until it is a call
        assert said == "" or is_cut_marker(name, said) or (name in FRONT_ONLY and not calls(found)), begun


@pytest.mark.parametrize("name", sorted({*SPELL} - FRONT_ONLY - {"gpt_oss", "mistral", "gemma4"}))
def test_a_marker_in_json_that_takes_the_place_of_calls_is_content_wherever_it_is_cut(name: str):
    for start in tool_format(name).starts:
        text = f'{{"a": "see {start}'
        for end in range(1, len(text) + 1):
            found = events(parser(None, name, tools=NAMES, enforced=Enforced.FRONT), [text[:end]])
            assert content(found) == text[:end]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"na'),
        ("qwen3_xml", "<tool_call>\n<func"),
        ("phi", 'functools[{"name": '),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("llama3_json", '{"name": "f", "par'),
        ("pythonic", "[f"),
    ],
)
def test_without_a_grammar_what_is_no_call_yet_is_content_word_for_word(name: str, text: str):
    assert content(events(parser(None, name, tools=NAMES), [text])) == text


def test_what_a_model_ends_by_itself_is_shown_with_and_without_calls():
    for text, made in (("hello ", 0), (SPELL["hermes"](TWO) + " ok", 2)):
        for pieces in ([text], list(text)):
            made_parser = parser(None, "hermes", tools=NAMES, enforced=Enforced.CALLS)
            found = [event for piece in pieces for event in made_parser.push(piece)]
            assert not any(isinstance(one, Content) for one in found)
            found = join([*found, *made_parser.finish(by_itself=True)])
            assert len(calls(found)) == made
            assert content(found) == ("hello " if made == 0 else " ok")
