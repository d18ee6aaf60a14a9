"""One strict schema per route: what is accepted, what is refused and which field is named."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.api_errors import TABLE, refusal
from ostinato.runtime.http.api_schema import (
    IGNORED,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOPS,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    StreamOptions,
    TokenizeRequest,
    Wire,
)
from ostinato.runtime.messages import SamplingParams

CHAT: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, object] = {"model": "m", "prompt": "hi"}


def refused(schema: type[Wire], fields: dict[str, object]) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(fields)
    return refusal(caught.value)


WRONG = [
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("n", True),
    ("n", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stream", 1),
    ("stream", "true"),
    ("stop", 7),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 1]),
    ("stop", ["x"] * (MAX_STOPS + 1)),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": 1, "01": 2}),
    ("logit_bias", [1]),
    ("logit_bias", {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}),
    ("ignore_eos", "no"),
    ("priority", 2**31),
    ("cache_salt", 5),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1, "2"]),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)),
    ("logprob_token_ids", []),
    ("logprob_token_ids", [-1]),
    ("prompt_logprobs", "2"),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("request_id", "two words"),
    ("request_id", "a\r\nb"),
    ("request_id", ""),
    ("request_id", "x" * 129),
    ("return_token_ids", 1),
    ("spaces_between_special_tokens", "no"),
    ("priority", 1.5),
    ("stream_options", {"include_usage": True}),
    ("user_id", "x"),
]


@pytest.mark.parametrize("base", [(ChatRequest, CHAT), (CompletionRequest, TEXT)], ids=["chat", "text"])
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_value_names_its_field(base, name: str, value: object):
    schema, good = base
    error = refused(schema, {**good, name: value})
    assert error.param is not None
    assert re.split(r"[.\[]", error.param)[0] == name
    assert str(error).startswith(error.param)


ACCEPTED = [
    ("temperature", 1, 1.0),
    ("top_p", 1, 1.0),
    ("max_tokens", 16.0, 16),
    ("max_tokens", 1e9, 10**9),
    ("n", 2.0, 2),
    ("seed", -5, -5),
    ("logit_bias", {"5": -100, "7": 0.5}, {5: -100.0, 7: 0.5}),
    ("stop", ["a"] * MAX_STOPS, ["a"] * MAX_STOPS),
    ("top_k", -1, -1),
]


@pytest.mark.parametrize(("name", "value", "read"), ACCEPTED)
def test_good_value_is_read(name: str, value: object, read: object):
    got = getattr(ChatRequest.model_validate({**CHAT, name: value}), name)
    assert got == read
    assert type(got) is type(read)


def test_null_means_not_given():
    names = [*ChatRequest.model_fields, *UNSUPPORTED, *IGNORED]
    fields = ChatRequest.model_validate(dict.fromkeys(names) | CHAT)
    assert fields == ChatRequest.model_validate(CHAT)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_field_passes_when_it_asks_for_nothing_and_is_refused_by_name_otherwise(name: str):
    for value in UNSUPPORTED[name]:
        assert CompletionRequest.model_validate({**TEXT, name: value}).prompt == "hi"
    error = refused(CompletionRequest, {**TEXT, name: "something else"})
    assert error.param == name
    assert "is not supported" in str(error)


def test_what_asks_for_nothing_is_taken():
    assert refused(CompletionRequest, {**TEXT, "tools": [{"type": "function"}]}).param == "tools"
    fields = {**TEXT, "tools": [], "tool_choice": "auto", "user": "u"}
    assert CompletionRequest.model_validate(fields) == CompletionRequest.model_validate(TEXT)


def test_unknown_field_is_refused_by_name():
    error = refused(ChatRequest, {**CHAT, "tempo": 1})
    assert (error.param, str(error)) == ("tempo", "tempo: is not a known field")
    near = refused(ChatRequest, {**CHAT, "max_token": 1})
    assert str(near) == "max_token: is not a known field; did you mean 'max_tokens'?"
    assert "did you mean" not in str(refused(ChatRequest, {**CHAT, "max_tokens" * 10: 1}))


def test_required_field_is_named():
    assert str(refused(ChatRequest, {"model": "m"})) == "messages: is required"
    assert str(refused(CompletionRequest, {"model": "m"})) == "prompt: is required"


PROMPTS = ["text", ["one", "two"], [1, 2, 3], [[1, 2], [3]]]
BAD_PROMPTS = [
    (7, "prompt"),
    ({}, "prompt"),
    ([], "prompt"),
    ([1, "a"], "prompt[1]"),
    ([1, -1], "prompt[1]"),
    ([1, 2.5], "prompt[1]"),
    ([1, True], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([[1], [2, "x"]], "prompt[1][1]"),
    (["a"] * 1025, "prompt"),
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "texts", "ids", "id lists"])
def test_all_four_prompt_forms_are_read(prompt: object):
    assert CompletionRequest.model_validate({**TEXT, "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_prompt_names_the_element(prompt: object, param: str):
    assert refused(CompletionRequest, {**TEXT, "prompt": prompt}).param == param


def test_a_million_bad_elements_make_one_complaint():
    error = refused(CompletionRequest, {**TEXT, "prompt": [1] + ["x"] * 1_000_000})
    assert error.param == "prompt[1]"
    assert "more)" not in str(error)


BAD_MESSAGES = [
    ([], "messages"),
    ("hi", "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "king", "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": "x", "mood": "glad"}], "messages[0].mood"),
    (
        [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}],
        "messages[0].tool_calls[0].function.name",
    ),
    ([{"role": "system", "content": None}], "messages[0].content"),
    ([{"role": "tool", "tool_call_id": "c"}], "messages[0].content"),
    (
        [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text"}]}],
        "messages[1].content[0].text",
    ),
    (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
            }
        ],
        "messages[0].content[1].type",
    ),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_bad_message_is_named_to_the_part(messages: object, param: str):
    assert refused(ChatRequest, {**CHAT, "messages": messages}).param == param


def test_image_part_is_told_that_only_text_is_read():
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refused(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [part]}]})
    assert "'image_url' parts are not supported" in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [3]}, "logprob_token_ids"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_chat_fields_that_disagree_are_named(fields: dict[str, object], param: str):
    assert refused(ChatRequest, {**CHAT, **fields}).param == param


@pytest.mark.parametrize(
    "fields", [{"best_of": 0}, {"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": "2"}]
)
def test_best_of_below_n_or_streamed_is_refused(fields: dict[str, object]):
    assert refused(CompletionRequest, {**TEXT, **fields}).param == "best_of"


def test_best_of_is_how_many_are_generated():
    assert CompletionRequest.model_validate({**TEXT, "n": 2, "best_of": 5}).sequences == 5
    assert CompletionRequest.model_validate({**TEXT, "n": 2, "best_of": 2, "stream": True}).sequences == 2
    assert CompletionRequest.model_validate(TEXT).sequences == 1


def test_tokenize_takes_a_prompt_or_messages():
    assert refused(TokenizeRequest, {}).param == "prompt"
    assert refused(TokenizeRequest, {"prompt": "x", "messages": CHAT["messages"]}).param == "prompt"
    assert refused(DetokenizeRequest, {"tokens": [1, "2"]}).param == "tokens[1]"


def test_ranges_are_those_of_the_engine():
    """The two declarations may not drift apart: bounds are compared field by field."""
    shared = SamplingRequest.model_fields.keys() & SamplingParams.model_fields.keys()
    compared = 0
    ids = {name for name in shared if name.endswith("_token_ids")}
    for name in shared - ids - {"stop", "logit_bias", "seed"}:
        ours = set(re.findall(r"\b(?:ge|gt|le|lt)=[-\d.]+", repr(SamplingRequest.model_fields[name])))
        theirs = set(re.findall(r"\b(?:ge|gt|le|lt)=[-\d.]+", repr(SamplingParams.model_fields[name])))
        assert ours == theirs, name
        compared += bool(theirs)
    assert compared == 11


def test_every_field_and_error_code_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    fields = {
        *(name for schema in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
          for name in schema.model_fields),
        *StreamOptions.model_fields, *UNSUPPORTED, *IGNORED,
    }  # fmt: skip
    codes = {answer.code for _, answer in TABLE if answer.code is not None}
    assert [name for name in sorted(fields | codes) if f"`{name}`" not in text] == []
