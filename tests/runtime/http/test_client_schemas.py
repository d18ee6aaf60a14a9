"""Fields of the Responses, Messages and pooling APIs: each is read, dropped, or refused by its name."""

from typing import Any

import pytest
from pydantic import ValidationError

from ostinato.errors import InvalidRequest
from ostinato.runtime.http import messages_prompt, responses_prompt
from ostinato.runtime.http.api_errors import refusal
from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.http.messages_schema import CountRequest, MessagesRequest
from ostinato.runtime.http.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from ostinato.runtime.http.responses_schema import InputTokensRequest, ResponsesRequest
from ostinato.runtime.http.shared_sampling import SharedSampling
from ostinato.runtime.http.wire import Wire

MESSAGE = {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
LEAST: dict[type[Wire], dict[str, Any]] = {
    ResponsesRequest: {"input": "x"},
    InputTokensRequest: {"input": "x"},
    MessagesRequest: MESSAGE,
    CountRequest: {"messages": MESSAGE["messages"]},
    EmbeddingRequest: {"input": "x"},
    ScoreRequest: {"text_1": "x", "text_2": "y"},
    RerankRequest: {"query": "x", "documents": ["y"]},
}
SCHEMAS = pytest.mark.parametrize("schema", LEAST, ids=lambda schema: schema.__name__)


def refused(schema: type[Wire], **fields: Any) -> InvalidRequest:
    with pytest.raises(ValidationError) as error:
        schema.model_validate({**LEAST[schema], **fields})
    return refusal(error.value)


@SCHEMAS
def test_fields_that_a_schema_lacks_are_dropped_or_refused_by_name(schema):
    least = schema.model_validate(LEAST[schema])
    for name in schema.ignored:
        assert schema.model_validate({**LEAST[schema], name: {"any": ["thing"]}}) == least
    for name, accepted in schema.unsupported.items():
        for value in (None, *accepted):
            assert schema.model_validate({**LEAST[schema], name: value}) == least
        assert refused(schema, **{name: "other"}).param == name
    for name in ("max_token", "n", "logprobs", "", "é"):
        assert refused(schema, **{name: 1}).param == name
    assert not schema.ignored & schema.unsupported.keys()
    assert not (schema.ignored | schema.unsupported.keys()) & schema.model_fields.keys()


@SCHEMAS
def test_null_means_not_given(schema):
    least = schema.model_validate(LEAST[schema])
    nothing = dict.fromkeys(schema.model_fields.keys() - LEAST[schema].keys())
    assert schema.model_validate({**LEAST[schema], **nothing}) == least


def test_shared_fields_have_the_ranges_of_chat():
    ours, chat = (schema.model_json_schema()["properties"] for schema in (SharedSampling, ChatRequest))
    for name, said in ours.items():
        for one in (said, chat[name]):
            del one["description"], one["x-default"]
        assert said == chat[name], name


def test_shared_fields_reach_the_chat_request():
    values: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"7": 1.0}, "seed": 3,
        "min_tokens": 1, "stop_token_ids": [5], "ignore_eos": True, "priority": -2, "cache_salt": "s",
        "chat_template_kwargs": {"a": 1},
    }  # fmt: skip
    assert values.keys() == SharedSampling.model_fields.keys() - {"model"}
    response = ResponsesRequest.model_validate({**LEAST[ResponsesRequest], **values})
    message = MessagesRequest.model_validate({**LEAST[MessagesRequest], **values})
    for chat in (
        responses_prompt.chat_of(response, [], responses_prompt.input_items(response))[0],
        messages_prompt.chat_of(message)[0],
    ):
        made = chat.model_dump(include=set(values))
        assert made == {**values, "logit_bias": {7: 1.0}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "odd": 1}]}, "input[0].odd"),
        ({"max_output_tokens": "2"}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}}, "tool_choice.tools[0]"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"stream_options": {}}, "stream_options"),
        ({"include": ["everything"]}, "include[0]"),
    ],
)
def test_refusals_of_responses_name_the_place(fields, param):
    assert refused(ResponsesRequest, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
            "messages[0].content[0].type",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
    ],
)
def test_refusals_of_messages_name_the_place(fields, param):
    assert refused(MessagesRequest, **fields).param == param


def test_turns_of_one_role_are_one_turn_with_everything_in_it():
    fields = MessagesRequest.model_validate(
        {
            "max_tokens": 3,
            "system": "s",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
            ],
        }
    )
    chat, names = messages_prompt.chat_of(fields)
    assert [(one.role, one.content) for one in chat.messages] == [
        ("system", "s"),
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", ""),
    ]
    assert (chat.messages[2].reasoning_content, len(chat.messages[2].tool_calls)) == ("t", 1)
    assert [names.of(f"messages[{at}].content") for at in range(4)] == [
        "system",
        "messages[0]",
        "messages[2]",
        "messages[5]",
    ]
