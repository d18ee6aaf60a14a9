"""`parse_thinking` and `parse_tool_calls`: whole texts, strict and lenient."""

import pytest

from ostinato import ConfigError, parse_thinking, parse_tool_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "n": [1, {"x": null}]}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "n": [1, {"x": None}]}


def test_thinking_and_content():
    assert parse_thinking("<think>\na\n</think>\n\nb") == ("a", "b")
    assert parse_thinking("<|channel>thought\na<channel|>b", "gemma4", strict=True) == ("a", "b")
    assert parse_thinking(
        "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "gpt_oss"
    ) == (
        "a",
        "b",
    )
    assert parse_thinking("b", strict=True) == ("", "b")
    assert parse_thinking("b", "deepseek_r1") == ("", "b")


def test_a_missing_start_is_found_out_or_said():
    for name in ("qwen3", "deepseek_r1", "minimax", "granite"):
        assert parse_thinking("a</think>b", name) == ("a", "b")
    assert parse_thinking("a", begun=True) == ("a", "")
    assert parse_thinking("a</think>b", begun=True, strict=True) == ("a", "b")
    with pytest.raises(ValueError, match="never began: <think> is missing; or set begun=True"):
        parse_thinking("a</think>b", strict=True)


def test_a_missing_end_is_an_error_only_in_strict_mode():
    assert parse_thinking("<think>a") == ("a", "")
    with pytest.raises(ValueError, match="no end: </think> is missing"):
        parse_thinking("<think>a", strict=True)


def test_calls_and_the_text_around_them():
    found = parse_tool_calls(f"I look.\n{CALL}\n{CALL} ok", strict=True, tools=["f"])
    assert found.content == "I look. ok"
    assert found.calls == [("f", ARGUMENTS, True)] * 2


@pytest.mark.parametrize(
    ("end", "saved"),
    [
        ('"n": [1, {"x": null}]}', ARGUMENTS),
        ('"n": [1, {"x": nul', {"city": "Köln", "n": [1, {}]}),
        ('"n": [1', {"city": "Köln", "n": [1]}),
        ('"n"', {"city": "Köln"}),
        ("öln", {"city": "Köln"}),
        ('"city": "K', {"city": "K"}),
        ('{"cit', {}),
        ('"arguments": {', {}),
    ],
)
def test_a_call_that_breaks_off_is_saved_or_refused(end: str, saved: dict):
    text = CALL[: CALL.index(end) + len(end)]
    (call,) = parse_tool_calls(text).calls
    assert (call.name, call.arguments) == ("f", saved)
    assert call.whole == (saved == ARGUMENTS)
    if not call.whole:
        with pytest.raises(ValueError, match="call of 'f': its arguments are no complete JSON object"):
            parse_tool_calls(text, strict=True)


def test_strict_refuses_what_lenient_lets_pass():
    assert parse_tool_calls("<tool_call> no").content == "<tool_call> no"
    with pytest.raises(ValueError, match="no call behind it"):
        parse_tool_calls("<tool_call> no", strict=True)
    text = '<tool_call>{"name": "f", "arguments": {"x": nope}}</tool_call>'
    assert parse_tool_calls(text).calls == [("f", {}, True)]
    with pytest.raises(ValueError, match="no complete JSON object"):
        parse_tool_calls(text, strict=True)
    with pytest.raises(ValueError, match="no such tool; there are g"):
        parse_tool_calls(CALL, tools=["g"], strict=True)


def test_an_answer_in_json_needs_the_tools_to_be_known():
    text = '{"name": "f", "parameters": {"a": 1}}'
    assert parse_tool_calls(text, "llama3_json", tools=["g"]).content == text
    assert parse_tool_calls(text, "llama3_json", tools=["f"]).calls == [("f", {"a": 1}, True)]


def test_unknown_formats_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'qwen': no such format; one of deepseek_r1, .*qwen3"):
        parse_thinking("x", "qwen")
    with pytest.raises(ConfigError, match=r"tool parser='x': no such format; one of .*hermes"):
        parse_tool_calls("x", "x")
