"""Tools and thoughts through POST /v1/chat/completions: what a client reads, streamed and whole."""

import json

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from ostinato.errors import ConfigError
from ostinato.runtime.http.chat_format import shows_tools
from tests.support.tool_serving import (
    ARGUMENTS,
    ASK,
    CALL,
    CHAT,
    SECOND,
    TEMPLATE,
    WEATHER,
    both,
    served,
)
from tests.support.toy_text import CHATML, tokenizer


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_thoughts_text_and_calls_come_apart_streamed_as_whole(chunk: int):
    async with served(f"<think>\nhm\n</think>\n\nI look.\n{CALL}{SECOND}", chunk=chunk) as server:
        streamed, whole = await both(server)
    assert (
        streamed
        == whole
        == {
            "content": "I look.",
            "reasoning_content": "hm",
            "calls": [{"name": "get_weather", "arguments": ARGUMENTS}, {"name": "now", "arguments": "{}"}],
            "finish_reason": "tool_calls",
        }
    )


async def test_whole_message_with_calls_has_no_content_and_openai_s_shape():
    async with served(CALL) as server:
        _, body = await server.post(CHAT, ASK)
    (choice,) = body["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}


async def test_tools_reach_the_template_and_a_conversation_with_calls_goes_on():
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    async with served("ok") as server:
        status, body = await server.post(CHAT, {**ASK, "messages": history})
        prompt = server.state.text.decode(server.engine.requests[0].prompt_token_ids, skip_special=False)
    assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
    assert json.loads(prompt.partition("<tools>")[2].partition("</tools>")[0]) == WEATHER
    assert '<tool_call>{"a": 1}</tool_call>' in prompt
    assert "<|im_start|>tool\nrain" in prompt


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
async def test_thoughts_that_come_back_reach_the_template_under_its_name(name: str):
    template = "{% for message in messages %}[{{ message." + name + " }}]{% endfor %}"
    thought = {"role": "assistant", "content": "" if name == "thinking" else "x", "reasoning": "because"}
    async with served("ok", template=template) as server:
        fields = {"messages": [*ASK["messages"], thought], "tools": None}
        status, _ = await server.post(CHAT, {**ASK, **fields})
        prompt = server.state.text.decode(server.engine.requests[0].prompt_token_ids)
    assert (status, prompt) == (200, "[][because]")


async def test_with_tool_choice_none_or_without_tools_calls_are_text():
    async with served(CALL) as server:
        for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
            streamed, whole = await both(server, **fields)
            assert streamed == whole
            assert (whole["content"], whole["calls"], whole["finish_reason"]) == (CALL, [], "stop")


async def test_without_parallel_calls_the_answer_ends_behind_the_first():
    async with served(f"{CALL}{SECOND} and more") as server:
        streamed, whole = await both(server, parallel_tool_calls=False)
        assert len(server.engine.aborted) == 2  # the engine would have gone on
    assert streamed == whole
    assert [call["name"] for call in whole["calls"]] == ["get_weather"]
    assert whole["finish_reason"] == "tool_calls"


async def test_an_answer_cut_in_a_call_ends_with_length():
    async with served(CALL) as server:
        streamed, whole = await both(server, max_tokens=45)
    assert streamed == whole
    assert whole["finish_reason"] == "length"
    (call,) = whole["calls"]
    assert ARGUMENTS.startswith(call["arguments"])
    assert call["name"] == "get_weather"


async def test_a_call_that_ends_with_eos_before_its_arguments_has_none_and_one_cut_there_nothing():
    """Case B07: the token that ends a call of gpt-oss is an EOS, which is not in the text."""
    text = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    template = TEMPLATE + "{# <|channel|> <|message|> #}"
    async with served(text, template=template, tool_parser="gpt_oss", reasoning_parser="gpt_oss") as server:
        streamed, whole = await both(server)
        assert streamed == whole
        assert whole["calls"] == [{"name": "now", "arguments": "{}"}]
        assert whole["finish_reason"] == "tool_calls"
        size = len(tokenizer().encode(text, add_special_tokens=False).ids)
        streamed, whole = await both(server, max_tokens=size)
        assert streamed == whole
        assert (whole["calls"], whole["finish_reason"]) == ([{"name": "now", "arguments": ""}], "length")


async def test_thinking_may_begin_in_the_prompt_and_stay_out_of_the_answer():
    async with served("hm</think>yes") as server:
        streamed, whole = await both(server, chat_template_kwargs={"enable_thinking": True})
        assert streamed == whole
        assert (whole["reasoning_content"], whole["content"]) == ("hm", "yes")
        streamed, whole = await both(server, reasoning_effort="high", include_reasoning=False)
        assert streamed == whole
        assert (whole["reasoning_content"], whole["content"]) == ("", "yes")
        _, body = await server.post(CHAT, {**ASK, "reasoning_effort": "high", "include_reasoning": False})
        assert body["choices"][0]["message"].keys() == {"role", "content", "refusal"}


async def test_thinking_goes_on_in_a_message_that_is_continued():
    async with served("hm</think>yes") as server:
        for begun, expected in (("<think>so", ("hm", "yes")), ("<think>a</think>so", ("", "hm</think>yes"))):
            messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
            streamed, whole = await both(server, messages=messages, continue_final_message=True)
            assert streamed == whole
            if expected[0]:
                assert (whole["reasoning_content"], whole["content"]) == expected
            else:
                assert whole["reasoning_content"] == ""


async def test_usage_counts_the_tokens_of_thoughts():
    text = "<think>hm hm</think>yes"
    async with served(text, chunk=3) as server:
        events = await server.events(CHAT, {**ASK, "stream_options": {"include_usage": True}})
        _, whole = await server.post(CHAT, ASK)
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    # With a marker of several tokens thoughts are known to begin with its last one.
    head = len(tokenizer().encode("<think>", add_special_tokens=False).ids) - 1
    tail = len(tokenizer().encode("yes", add_special_tokens=False).ids)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(ids) - head - tail}
    assert events[-2]["usage"] == whole["usage"]


async def test_an_effort_that_the_template_does_not_know_is_refused():
    async with served("x", template=CHATML) as server:
        status, body = await server.post(CHAT, {**ASK, "tools": None, "reasoning_effort": "low"})
        assert (status, body["error"]["param"]) == (400, "reasoning_effort")
        status, _ = await server.post(CHAT, {**ASK, "tools": None, "reasoning_effort": "none"})
        assert status == 200  # it does not think anyway


async def test_a_stop_string_is_looked_for_in_content_alone():
    async with served("<think>9.11 or 9.8</think>value: <tool 9.8 END") as server:
        streamed, whole = await both(server, stop=["9.8"])
        assert streamed == whole
        assert (whole["reasoning_content"], whole["content"]) == ("9.11 or 9.8", "value: <tool ")
        assert whole["finish_reason"] == "stop"
        streamed, whole = await both(server, stop=["END", "<tool"])
        assert (whole["content"], whole["finish_reason"]) == ("value: ", "stop")


async def test_logprobs_list_every_token_of_thoughts_and_calls_too():
    text = f"<think>hm</think>yes {CALL}"
    async with served(text) as server:
        for stop in (None, ["never"]):
            events = await server.events(CHAT, {**ASK, "logprobs": True, "stop": stop})
            _, whole = await server.post(CHAT, {**ASK, "logprobs": True, "stop": stop})
            content = whole["choices"][0]["logprobs"]["content"]
            assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
            streamed = [
                entry
                for event in events[:-1]
                for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert streamed == content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
async def test_what_is_wrong_with_tools_is_a_400_that_names_the_field(fields: dict, param: str):
    async with served("x") as server:
        status, body = await server.post(CHAT, {**ASK, **fields})
    assert (status, body["error"]["param"]) == (400, param), body


async def test_tools_need_a_template_that_shows_them_and_a_known_format():
    async with served("x", template=CHATML, tool_parser="hermes") as server:
        status, body = await server.post(CHAT, ASK)
        assert (status, body["error"]["param"]) == (400, "tools")
        assert "template" in body["error"]["message"]
    async with served(CALL, tool_parser="none", reasoning_parser="none") as server:
        status, body = await server.post(CHAT, ASK)
        assert (status, body["error"]["param"]) == (400, "tools")
        assert "server.tool_parser" in body["error"]["message"]
        _, whole = await server.post(CHAT, {**ASK, "tools": None})
        assert whole["choices"][0]["message"]["content"] == CALL


async def test_an_unknown_parser_is_an_error_at_start_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"server.tool_parser='hermse'.*hermes"):
        async with served("x", tool_parser="hermse"):
            pass


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ call.function.arguments | tojson }}", '{"a": "ü", "n": 9007199254740993}'),
        ("{{ call.function.arguments }}", '{"a": "ü", "n": 9007199254740993}'),
        ("{{ 'f' + call.function.arguments }}", 'f{"a": "ü", "n": 9007199254740993}'),
        (
            "{% for k, v in call.function.arguments|items %}{{ k }}={{ v }};{% endfor %}",
            "a=ü;n=9007199254740993;",
        ),
    ],
)
async def test_arguments_of_past_calls_have_the_form_that_the_template_reads(shown: str, expected: str):
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}" + shown + "{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "ü", "n": 9007199254740993}'}}
    async with served("ok", template=template) as server:
        messages = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
        status, _ = await server.post(CHAT, {**ASK, "tools": None, "messages": messages})
        prompt = server.state.text.decode(server.engine.requests[0].prompt_token_ids)
    assert (status, prompt) == (200, expected)


async def test_an_empty_answer_comes_back_as_null_or_as_empty_text():
    async with served("ok") as server:
        for content in ("", None):
            said = {"role": "assistant", "content": content, "reasoning_content": "hm"}
            status, _ = await server.post(
                CHAT, {**ASK, "messages": [*ASK["messages"], said, *ASK["messages"]]}
            )
            assert status == 200
        first, second = (request.prompt_token_ids for request in server.engine.requests)
    assert first == second


@pytest.mark.parametrize(
    ("template", "shows"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("""{{ '{"name": "x", "arguments": {}}' }}{{ tools }}""", True),
        (r"""{{ 'it\'s "' }}{%- if tools -%}{% endif %}""", True),
        ("{# don't #}{{ tools|tojson }}", True),
        ("""{{ '{"arguments": {}}' ~ 'tools' }}""", False),
        (r"{{ 'it\'s' }}{{ 'tools' }}", False),
        ("{{ message.tools }}{{ tools_shown }}", False),
        ("{% raw %}{{ tools }}{% endraw %}{# tools #} tools", False),
    ],
)
def test_a_template_shows_tools_when_it_reads_the_variable(template: str, shows: bool):
    assert shows_tools(template) is shows


async def test_variables_of_a_template_are_not_looked_for_in_its_words():
    template = CHATML + "{{ 'enable_thinking and tools' }} reasoning_effort"
    async with served("x", template=template, tool_parser="hermes") as server:
        status, body = await server.post(CHAT, {**ASK, "reasoning_effort": "low", "tools": None})
        assert (status, body["error"]["param"]) == (400, "reasoning_effort")
        status, body = await server.post(CHAT, ASK)
        assert (status, body["error"]["param"]) == (400, "tools")


class Weather(BaseModel):
    """What the official client's helper makes a strict tool of."""

    city: str
    days: int


async def test_the_official_client_runs_an_agent_s_loop_and_parses_strict_tools():
    weather = pydantic_function_tool(Weather, name="get_weather")
    asked = {"model": "toy", "messages": ASK["messages"], "tools": [weather]}
    async with (
        served(f"<think>hm</think>{CALL}") as server,
        AsyncOpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=0) as client,
    ):
        first = await client.chat.completions.create(**asked)
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"city": "Köln 😀", "days": 9007199254740993}
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        await client.chat.completions.create(**{**asked, "messages": [*ASK["messages"], message, result]})
        prompt = server.state.text.decode(server.engine.requests[-1].prompt_token_ids)
        assert "rain" in prompt
        async with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type async for event in stream}
            final = (await stream.get_final_completion()).choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (parsed,) = final.tool_calls
    assert parsed.function.parsed_arguments == Weather(city="Köln 😀", days=9007199254740993)
