"""Thoughts of every format: the same events for every cut, and what the markers mean."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.output.events import Content, Reasoning
from ostinato.runtime.output.registry import reasoning_format, reasoning_names
from tests.support.parsed_text import calls, content, cut, events, parser, thoughts

FINAL = "<|start|>assistant<|channel|>final<|message|>"
# (name, end of the prompt, text): thoughts "a b\nc", content "yes\n\nno"
PLAIN = [
    ("qwen3", "", "<think>\na b\nc\n</think>\n\nyes\n\nno"),
    ("qwen3", "assistant\n<think>\n", "a b\nc</think>yes\n\nno"),
    ("qwen3", "assistant\n<think>\n", "\n<think>\na b\nc</think>yes\n\nno"),
    ("deepseek_r1", "<｜Assistant｜>", "a b\nc\n</think>\n\nyes\n\nno"),
    ("deepseek_r1", "<｜Assistant｜><think>\n", "a b\nc\n</think>\n\nyes\n\nno"),
    ("deepseek_r1", "", "<think>\na b\nc\n</think>yes\n\nno"),
    ("minimax", "ai\n<think>\n", "a b\nc\n</think>\n\nyes\n\nno"),
    ("mistral", "", "[THINK]a b\nc[/THINK]yes\n\nno"),
    ("granite", "", "Here is my thought process:\na b\nc\n\nHere is my response:\nyes\n\nno"),
    ("granite", "", "<think>a b\nc</think>\n<response>yes\n\nno</response>"),
    ("gemma4", "<|turn>model\n", "<|channel>thought\na b\nc<channel|>yes\n\nno"),
    ("gemma4", "<|turn>model\n<|channel>thought\n", "a b\nc<channel|>yes\n\nno"),
    ("gpt_oss", "", f"<|channel|>analysis<|message|>a b\nc<|end|>{FINAL}yes\n\nno<|return|>"),
    ("gpt_oss", "<|start|>assistant", f"<|channel|>analysis<|message|>a b\nc{FINAL}yes\n\nno"),
    ("gpt_oss", "assistant<|channel|>analysis<|message|>", f"a b\nc<|end|>{FINAL}yes\n\nno<|return|>"),
    ("gpt_oss", "assistant<|channel|>analysis<|message|>It is", f"a b\nc{FINAL}yes\n\nno"),
]  # fmt: skip


def every_cut(name: str, text: str, prompt_end: str = "", tools: str | None = None) -> list:
    whole = events(parser(name, tools, prompt_end=prompt_end), [text])
    assert events(parser(name, tools, prompt_end=prompt_end), list(text)) == whole
    for at in range(1, len(text)):
        assert events(parser(name, tools, prompt_end=prompt_end), [text[:at], text[at:]]) == whole, at
    return whole


def test_every_format_is_tested_here():
    assert {name for name, _, _ in PLAIN} == set(reasoning_names())


@pytest.mark.parametrize(("name", "prompt_end", "text"), PLAIN)
def test_thoughts_and_content_come_apart_for_every_cut(name: str, prompt_end: str, text: str):
    assert every_cut(name, text, prompt_end) == [Reasoning("a b\nc"), Content("yes\n\nno")]


@pytest.mark.parametrize(("name", "prompt_end", "text"), PLAIN)
def test_thoughts_that_break_off_are_thoughts(name: str, prompt_end: str, text: str):
    found = every_cut(name, text[: text.index("b")], prompt_end)
    assert (thoughts(found), content(found)) == ("a ", "")


@pytest.mark.parametrize("name", reasoning_names())
def test_an_answer_without_thoughts_is_content(name: str):
    text = f"{FINAL}yes </no> no" if name == "gpt_oss" else "yes </no> no"
    assert every_cut(name, text, "</think>") == [Content("yes </no> no")]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "minimax"])
def test_thoughts_that_the_prompt_has_closed_are_over(name: str):
    text = "yes, <think> is a tag"
    assert every_cut(name, text, "assistant\n<think>\n\n</think>\n\n") == [Content(text)]


@pytest.mark.parametrize("behind", ["<|start|>assistant", FINAL])
def test_channels_that_the_prompt_has_left_are_over(behind: str):
    prompt_end = f"<|channel|>analysis<|message|>hm<|end|>{behind}"
    text = "yes" if behind == FINAL else "<|channel|>final<|message|>yes"
    assert every_cut("gpt_oss", text, prompt_end) == [Content("yes")]


def test_a_prompt_that_speaks_of_the_marker_has_not_begun_thoughts():
    prompt_end = "what is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert every_cut("qwen3", "a tag", prompt_end) == [Content("a tag")]


def test_think_tags_count_in_front_of_content_only_and_several_blocks_there():
    text = "<think>a</think>\n<think>b</think>\n\nuse <think> and </think> so"
    found = every_cut("qwen3", text)
    assert (thoughts(found), content(found)) == ("ab", "use <think> and </think> so")


def test_an_end_without_a_start_is_not_shown():
    for name, marker in (("qwen3", "</think>"), ("gemma4", "<channel|>"), ("mistral", "[/THINK]")):
        found = every_cut(name, f"no start{marker}yes")
        assert (thoughts(found), content(found)) == ("", "no startyes")


def test_gemma_keeps_text_before_the_channel_and_strips_only_its_label():
    text = "Well.<|channel>thought\na<channel|> So.<|channel>thoughtful\nb<channel|>"
    found = every_cut("gemma4", text)
    assert (thoughts(found), content(found)) == ("athoughtful\nb", "Well. So.")
    assert every_cut("gemma4", "<|channel>thought\n<channel|>yes") == [Content("yes")]
    assert every_cut("gemma4", "<|channel>thought<channel|>yes") == [Content("yes")]
    for end in range(len("thought\n") + 1):
        assert every_cut("gemma4", "<|channel>" + "thought\n"[:end]) == []


def test_gemma_s_call_ends_thoughts_that_have_no_end():
    found = every_cut("gemma4", "<|channel>thought\na\n<|tool_call>call:f{}<tool_call|>", tools="gemma4")
    assert (thoughts(found), calls(found), content(found)) == ("a", [("f", "{}")], "")


def test_a_call_among_think_tags_is_a_thought():
    text = '<think>I could <tool_call>{"name": "f"}</tool_call></think>yes'
    found = every_cut("qwen3", text, tools="hermes")
    assert (thoughts(found), calls(found)) == ('I could <tool_call>{"name": "f"}</tool_call>', [])
    assert content(found) == "yes"


def test_thoughts_may_come_between_calls_and_a_tag_in_arguments_is_none():
    call = '<tool_call>{"name": "f", "arguments": {"x": "<think>a</think>"}}</tool_call>'
    found = every_cut("qwen3", f"<think>a</think>{call}\n<think>b</think>\n{call}", tools="hermes")
    assert (thoughts(found), content(found)) == ("ab", "")
    assert calls(found) == [("f", '{"x":"<think>a</think>"}')] * 2


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look. "
        "<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>1+1<|call|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    found = every_cut("gpt_oss", text, tools="gpt_oss")
    assert (thoughts(found), content(found)) == ("hm1+1", "I look.")
    assert calls(found) == [("f", '{"a":1}')]
    assert calls(every_cut("gpt_oss", text)) == []


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", reasoning_names())
def test_any_text_gives_the_same_events_for_any_cut(name: str, data: st.DataObject):
    tools = {"gemma4": "gemma4", "gpt_oss": "gpt_oss", "mistral": "mistral"}.get(name, "hermes")
    scraps = [*reasoning_format(name).markers, "thought\n", "<tool_call>", "\n", " ", "a", "text ", "<", "["]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=8)))
    places = data.draw(st.lists(st.integers(0, 200), max_size=6))
    prompt_end = data.draw(st.sampled_from(["", "<think>\n", "<|channel>thought\n"]))
    whole = events(parser(name, tools, prompt_end=prompt_end), [text])
    assert events(parser(name, tools, prompt_end=prompt_end), cut(text, places)) == whole
    assert events(parser(name, tools, prompt_end=prompt_end), list(text)) == whole
