"""Tools and thoughts with the official clients of the Responses and Messages APIs, streamed as whole."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from ostinato.errors import InvalidRequest
from tests.support.fake_engine import Script, say
from tests.support.serving import Served, serving
from tests.support.toy_text import CHATML, front_end, tokenizer

TEMPLATE = (
    "{%- if tools %}{% for t in tools %}<tools>{{ t | tojson }}</tools>{% endfor %}{% endif %}"
    "{%- for m in messages if m.reasoning_content %}[{{ m.reasoning_content }}]{% endfor %}"
    + CHATML
    + "{% if enable_thinking %}<think>\n{% endif %}{# <tool_call> #}"
)
ARGUMENTS = {"city": "Köln 😀", "days": 3}
ANSWER = (
    "<think>\nhm 😀\n</think>\n\nLet me look."
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RESPONSES_TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "d", "parameters": SCHEMA, "strict": None},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
MESSAGES_TOOLS: list[Any] = [
    {"name": "get_weather", "description": "d", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]


def writes(text: str) -> Script:
    return say(tokenizer().encode(text, add_special_tokens=False).ids, stop_id=1)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    text = front_end(template=TEMPLATE)
    async with serving(writes(ANSWER), text=text, window=2000, api_key="secret") as running:
        yield running


@pytest.fixture
async def openai(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="secret", base_url=f"{served.url}/v1", max_retries=0) as made:
        yield made


@pytest.fixture
async def anthropic(served: Served) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(api_key="secret", base_url=served.url, max_retries=0) as made:
        yield made


def prompt_of(served: Served, at: int = -1) -> str:
    return tokenizer().decode(list(served.engine.requests[at].prompt_token_ids), skip_special_tokens=False)


async def test_a_response_has_thoughts_text_and_calls_streamed_as_whole(openai: AsyncOpenAI, served: Served):
    asked = {"model": "toy", "input": "Hello", "tools": RESPONSES_TOOLS}
    made = await openai.responses.create(**asked)
    thought, _, weather, now = made.output
    assert thought.content[0].text.strip() == "hm 😀"
    assert made.output_text == "Let me look."
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", ARGUMENTS)
    assert (now.name, now.arguments) == ("now", "{}")
    assert made.status == "completed"
    thought_tokens = len(tokenizer().encode("\nhm 😀\n", add_special_tokens=False).ids)
    assert thought_tokens <= made.usage.output_tokens_details.reasoning_tokens <= thought_tokens + 16
    assert '"name": "get_weather"' in prompt_of(served)
    stream = await openai.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    final = events[-1].response
    assert final.usage == made.usage
    assert [without_ids(item) for item in final.output] == [without_ids(item) for item in made.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    for item, at in zip(final.output, range(4), strict=True):
        own = [event for event in events if getattr(event, "output_index", None) == at]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)


async def test_thoughts_take_the_place_of_a_summary_where_one_is_asked_for(
    openai: AsyncOpenAI, served: Served
):
    asked = {"model": "toy", "input": "Hello", "tools": RESPONSES_TOOLS, "reasoning": {"summary": "auto"}}
    made = await openai.responses.create(**asked)
    thought = made.output[0]
    assert [(part.type, part.text.strip()) for part in thought.summary] == [("summary_text", "hm 😀")]
    assert thought.content == []
    assert made.reasoning.summary == "auto"
    async with openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
    own = [event for event in events if getattr(event, "output_index", None) == 0]
    assert list(dict.fromkeys(event.type for event in own)) == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert {event.summary_index for event in own[1:-1]} == {0}
    assert "".join(event.delta for event in own if event.type.endswith(".delta")) == own[-3].text
    assert own[-1].item.summary[0].text == own[-2].part.text == own[-3].text == thought.summary[0].text
    output = {"type": "function_call_output", "call_id": made.output[-1].call_id, "output": "x"}
    await openai.responses.create(**{**asked, "input": [*made.output, output]})
    assert f"[{thought.summary[0].text}]" in prompt_of(served), prompt_of(served)


def without_ids(item: Any) -> dict[str, Any]:
    return item.model_dump(exclude={"id", "call_id"})


async def test_the_stream_helper_of_responses_takes_calls(openai: AsyncOpenAI):
    async with openai.responses.stream(model="toy", input="Hello", tools=RESPONSES_TOOLS) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert [item.name for item in final.output if item.type == "function_call"] == ["get_weather", "now"]


async def test_results_of_calls_go_back_by_id_and_as_items(openai: AsyncOpenAI, served: Served):
    first = await openai.responses.create(model="toy", input="Hello", tools=RESPONSES_TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{item.name} is fine"}
        for item in first.output
        if item.type == "function_call"
    ]
    asked = {"model": "toy", "tools": RESPONSES_TOOLS}
    await openai.responses.create(**asked, input=results, previous_response_id=first.id)
    by_id = prompt_of(served)
    assert "[hm 😀" in by_id
    assert by_id.count("<|im_start|>assistant") == 2  # thoughts, text and calls are one turn
    assert '<tool_call>{"city": "Köln 😀", "days": 3}</tool_call><tool_call>{}</tool_call>' in by_id
    assert "<|im_start|>tool\nget_weather is fine<|im_end|>\n<|im_start|>tool\nnow is fine<|im_end|>" in by_id
    sent = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output), *results]
    await openai.responses.create(**asked, input=sent)
    assert prompt_of(served) == by_id


async def test_one_call_and_allowed_tools(openai: AsyncOpenAI, served: Served):
    one = await openai.responses.create(
        model="toy", input="Hello", tools=RESPONSES_TOOLS, parallel_tool_calls=False
    )
    assert [item.name for item in one.output if item.type == "function_call"] == ["get_weather"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    made = await openai.responses.create(
        model="toy", input="Hello", tools=RESPONSES_TOOLS, tool_choice=allowed
    )
    assert made.tool_choice.type == "allowed_tools"
    assert "get_weather" not in prompt_of(served)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_message_has_thoughts_text_and_calls(
    anthropic: AsyncAnthropic, served: Served, streamed: bool
):
    asked = {"model": "toy", "max_tokens": 999, "messages": [{"role": "user", "content": "Hello"}]}
    if streamed:
        async with anthropic.messages.stream(**asked, tools=MESSAGES_TOOLS) as stream:
            made = await stream.get_final_message()
    else:
        made = await anthropic.messages.create(**asked, tools=MESSAGES_TOOLS)
    thought, text, weather, now = made.content
    assert (thought.type, thought.thinking.strip()) == ("thinking", "hm 😀")
    assert text.text == "Let me look."
    assert (weather.name, weather.input) == ("get_weather", ARGUMENTS)
    assert (now.name, now.input) == ("now", {})
    assert made.stop_reason == "tool_use"
    assert 0 < made.usage.output_tokens_details.thinking_tokens < 30 < made.usage.output_tokens
    results = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "warm"}]},
        {"type": "tool_result", "tool_use_id": now.id, "content": "noon"},
        {"type": "text", "text": "So?"},
    ]
    more = [*asked["messages"], {"role": "assistant", "content": made.content}]
    more.append({"role": "user", "content": results})
    await anthropic.messages.create(**{**asked, "messages": more}, tools=MESSAGES_TOOLS)
    prompt = prompt_of(served)
    assert "[hm 😀" in prompt
    assert (
        'Let me look.<tool_call>{"city": "Köln 😀", "days": 3}</tool_call><tool_call>{}</tool_call>' in prompt
    )
    assert prompt.endswith(
        "<|im_start|>tool\nwarm<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_streamed_thoughts_end_with_a_signature(anthropic: AsyncAnthropic):
    """Vercel's AI SDK leaves thoughts that had none out of what it sends back."""
    asked = {"model": "toy", "max_tokens": 999, "messages": [{"role": "user", "content": "Hello"}]}
    stream = await anthropic.messages.create(**asked, tools=MESSAGES_TOOLS, stream=True)
    deltas = [event.delta async for event in stream if event.type == "content_block_delta"]
    kinds = [delta.type for delta in deltas]
    at = kinds.index("signature_delta")
    assert deltas[at].signature == ""
    assert (set(kinds[:at]), kinds[at + 1]) == ({"thinking_delta"}, "text_delta")
    assert kinds.count("signature_delta") == 1


async def test_thinking_is_switched_by_the_request(anthropic: AsyncAnthropic, served: Served):
    asked = {"model": "toy", "max_tokens": 999, "messages": [{"role": "user", "content": "Hello"}]}
    await anthropic.messages.create(**asked, extra_body={"thinking": {"type": "enabled"}})
    assert prompt_of(served).endswith("<think>\n")
    await anthropic.messages.create(**asked, thinking={"type": "disabled"})
    assert prompt_of(served).endswith("assistant\n")
    await anthropic.messages.create(**asked, output_config={"effort": "high"})
    assert prompt_of(served).endswith("<think>\n")


async def test_choices_of_tools_reach_the_answer(anthropic: AsyncAnthropic, served: Served):
    asked = {"model": "toy", "max_tokens": 999, "messages": [{"role": "user", "content": "Hello"}]}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = await anthropic.messages.create(**asked, tools=MESSAGES_TOOLS, tool_choice=choice)
    assert [block.name for block in one.content if block.type == "tool_use"] == ["get_weather"]
    none = await anthropic.messages.create(**asked, tools=MESSAGES_TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["thinking", "text"]
    assert none.stop_reason == "end_turn"


async def test_a_call_that_is_cut_short_says_so(
    openai: AsyncOpenAI, anthropic: AsyncAnthropic, served: Served
):
    limit = len(tokenizer().encode(ANSWER, add_special_tokens=False).ids) - 90
    made = await openai.responses.create(
        model="toy", input="Hello", tools=RESPONSES_TOOLS, max_output_tokens=limit
    )
    call = made.output[-1]
    assert (made.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
    message = await anthropic.messages.create(
        model="toy", max_tokens=limit, messages=[{"role": "user", "content": "Hello"}], tools=MESSAGES_TOOLS
    )
    assert (message.stop_reason, message.content[-1].type) == ("max_tokens", "tool_use")


async def test_anthropic_s_tool_runner_goes_on_where_threads_are_refused(
    anthropic: AsyncAnthropic, served: Served
):
    asked: list[int] = []

    @beta_async_tool
    async def get_weather(city: str, days: int) -> str:
        """Weather."""
        asked.append(days)
        return f"rain in {city}"

    @beta_async_tool
    async def now() -> str:
        """Time."""
        return "noon"

    told = writes("It rains.")
    served.engine.script = lambda request: (told if asked else writes(ANSWER))(request)
    runner = anthropic.beta.messages.tool_runner(
        model="toy", max_tokens=900, messages=[{"role": "user", "content": "Hello"}], tools=[get_weather, now]
    )
    last = await runner.until_done()
    assert (asked, last.content[0].text) == ([3], "It rains.")
    assert "rain in Köln 😀" in prompt_of(served)
    assert len(served.engine.requests) == 2


async def test_forced_calls_and_schemas_reach_the_engine(
    openai: AsyncOpenAI, anthropic: AsyncAnthropic, served: Served
):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    await openai.responses.create(model="toy", input="Hello", text={"format": wanted})
    asked = {"model": "toy", "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}]}
    output = {"format": {"type": "json_schema", "schema": schema}}
    await anthropic.messages.create(**asked, output_config=output)
    for request in served.engine.requests:
        assert request.sampling.response_format["json_schema"]["schema"] == schema
    named: Any = {"type": "function", "name": "now"}
    await openai.responses.create(model="toy", input="Hello", tools=RESPONSES_TOOLS, tool_choice=named)
    await anthropic.messages.create(
        **asked, tools=MESSAGES_TOOLS, tool_choice={"type": "tool", "name": "now"}
    )
    first, second = (request.sampling.grammar for request in served.engine.requests[2:])
    assert first is not None
    assert "now" in first
    assert "get_weather" not in first
    assert "now" in second
    with pytest.raises(BadRequestError, match=r"tool_choice\.name: is not among the tools"):
        await openai.responses.create(
            model="toy", input="x", tools=RESPONSES_TOOLS[1:], tool_choice={**named, "name": "get_weather"}
        )
    served.engine.script = lambda request: [InvalidRequest("response_format: no", param="response_format")]
    with pytest.raises(BadRequestError, match=r"text\.format: no") as bad:  # the engine compiles grammars
        await openai.responses.create(model="toy", input="Hello", text={"format": wanted}, stream=True)
    assert bad.value.param == "text.format"


class Stay(BaseModel):
    """What an answer is parsed to."""

    city: str
    days: int


async def test_what_a_client_library_parsed_of_an_answer_comes_back_with_it(
    openai: AsyncOpenAI, anthropic: AsyncAnthropic, served: Served
):
    stay, user = Stay.model_validate(ARGUMENTS), {"role": "user", "content": "Hello"}
    served.engine.script = writes(stay.model_dump_json())
    chat = await openai.chat.completions.parse(model="toy", messages=[user], response_format=Stay)
    response = await openai.responses.parse(model="toy", input="Hello", text_format=Stay)
    message = await anthropic.messages.parse(model="toy", max_tokens=99, messages=[user], output_format=Stay)
    answer = chat.choices[0].message
    assert answer.parsed == response.output_parsed == message.parsed_output == stay
    await openai.chat.completions.create(
        model="toy", messages=[user, answer.model_dump(warnings=False), user]
    )
    back = await openai.responses.create(model="toy", input=[user, *response.output, user])
    said = {"role": "assistant", "content": message.content}
    await anthropic.messages.create(model="toy", max_tokens=99, messages=[user, said, user])
    prompts = [prompt_of(served, at) for at in (-3, -2, -1)]
    assert prompts == prompts[:1] * 3
    assert f"assistant\n{stay.model_dump_json()}<|im_end|>" in prompts[0]
    listed = [item.to_json() async for item in openai.responses.input_items.list(back.id)]
    assert "parsed" not in "".join(listed)


async def test_parsed_arguments_of_a_call_come_back_with_it(openai: AsyncOpenAI, served: Served):
    schema = {**Stay.model_json_schema(), "additionalProperties": False}
    function = {"name": "get_weather", "parameters": schema, "strict": True}
    user, result = {"role": "user", "content": "Hello"}, "It rains."
    chat = await openai.chat.completions.parse(
        model="toy", messages=[user], tools=[{"type": "function", "function": function}]
    )
    response = await openai.responses.parse(
        model="toy", input="Hello", tools=[{"type": "function", **function}]
    )
    answer, call = chat.choices[0].message, response.output[-2]
    assert answer.tool_calls[0].function.parsed_arguments == call.parsed_arguments == ARGUMENTS
    ids = [
        (one.id, other.call_id) for one, other in zip(answer.tool_calls, response.output[-2:], strict=True)
    ]
    told = [{"role": "tool", "tool_call_id": one, "content": result} for one, _ in ids]
    await openai.chat.completions.create(model="toy", messages=[user, answer, *told])
    told = [{"type": "function_call_output", "call_id": other, "output": result} for _, other in ids]
    back = await openai.responses.create(model="toy", input=[user, *response.output, *told])
    assert prompt_of(served, -1) == prompt_of(served, -2)
    assert f"tool\n{result}<|im_end|>" in prompt_of(served)
    listed = [item.to_json() async for item in openai.responses.input_items.list(back.id)]
    assert "parsed" not in "".join(listed)


HOSTILE = ('{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "[" * 400 + "]" * 400 + "}", '{"a"')


@pytest.mark.parametrize("arguments", HOSTILE, ids=("nan", "infinity", "surrogate", "deep", "cut"))
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_arguments_that_a_model_made_up_are_an_answer_and_not_an_error(path: str, arguments: str):
    script = writes(f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>')
    messages = {"messages": [{"role": "user", "content": "Hello"}]}
    function = {"name": "now", "parameters": {"type": "object"}}
    fields: dict[str, Any] = {
        "/v1/messages": {"max_tokens": 1500, "tools": MESSAGES_TOOLS, **messages},
        "/v1/responses": {"input": "Hello", "tools": RESPONSES_TOOLS},
        "/v1/chat/completions": {"tools": [{"type": "function", "function": function}], **messages},
    }[path]
    async with serving(script, text=front_end(template=TEMPLATE), window=2000) as served:
        status, whole = await served.post(path, fields)
        assert status == 200, whole
        async with served.http.post(served.url + path, json={**fields, "stream": True}) as response:
            streamed = await response.text()
            assert "internal_error" not in streamed
        if path == "/v1/messages":
            (block,) = whole["content"]
            assert block["input"] == ({"a": "\ud800"} if "ud800" in arguments else {})


PAIRS = TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}",
)


@pytest.mark.parametrize("template", [TEMPLATE, PAIRS], ids=["prints text", "reads pairs"])
async def test_a_conversation_goes_on_behind_a_call_that_was_cut_or_says_why_it_cannot(template: str):
    script = writes('<tool_call>\n{"name": "now", "arguments": {"a": "b"}}\n</tool_call>')
    async with serving(script, text=front_end(template=template), window=2000) as served:
        fields = {"tools": RESPONSES_TOOLS, "max_output_tokens": 0}
        ids = (
            tokenizer()
            .encode('<tool_call>\n{"name": "now", "arguments": {"a":', add_special_tokens=False)
            .ids
        )
        status, cut = await served.post(
            "/v1/responses", {**fields, "input": "Hello", "max_output_tokens": len(ids)}
        )
        assert (status, cut["status"], cut["output"][-1]["type"]) == (200, "incomplete", "function_call")
        output = {"type": "function_call_output", "call_id": cut["output"][-1]["call_id"], "output": "x"}
        for more, param in (
            ({"previous_response_id": cut["id"], "input": [output]}, "previous_response_id"),
            ({"input": [{"role": "user", "content": "Hello"}, *cut["output"], output]}, "input[1]"),
        ):
            status, body = await served.post("/v1/responses", {**fields, **more, "max_output_tokens": 5})
            if template == TEMPLATE:
                assert status == 200, body
                assert json.dumps('{"a":') in prompt_of(served)
                continue
            assert (status, body["error"]["param"]) == (400, param)
            assert body["error"]["message"].startswith(
                f"{param}: the text of a call's arguments is not valid JSON: "
            )
