"""POST /v1/messages with Anthropic's own client, streamed and whole."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import anthropic
import pytest
from anthropic import AsyncAnthropic

from ostinato.errors import EngineError, Overloaded
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from tests.support.fake_engine import Script, say
from tests.support.serving import Served, serving
from tests.support.toy_text import tokenizer

TEXT = "ok 😀 yes"
ASK = {"model": "toy", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}


def answer(text: str = TEXT) -> Script:
    return say(tokenizer().encode(text, add_special_tokens=False).ids, stop_id=1)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(answer(), api_key="secret", window=300) as running:
        yield running


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(api_key="secret", base_url=served.url, max_retries=0) as made:
        yield made


def prompt_of(served: Served) -> str:
    return tokenizer().decode(list(served.engine.requests[-1].prompt_token_ids), skip_special_tokens=False)


async def test_whole_message_and_sent_back(client: AsyncAnthropic, served: Served):
    message = await client.messages.create(**ASK)
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": TEXT}
    ]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "toy")
    asked = served.engine.requests[0]
    assert message.usage.input_tokens == len(asked.prompt_token_ids)
    assert message.usage.output_tokens == len(tokenizer().encode(TEXT, add_special_tokens=False).ids) + 1
    more = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "x"},
    ]
    await client.messages.create(**{**ASK, "messages": more})
    assert f"assistant\n{TEXT}<|im_end|>" in prompt_of(served)


async def test_stream_has_the_documented_events_in_order(client: AsyncAnthropic, served: Served):
    stream = await client.messages.create(**ASK, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == TEXT
    prompt = len(served.engine.requests[0].prompt_token_ids)
    assert events[0].message.usage.input_tokens == events[-2].usage.input_tokens == prompt
    assert events[-2].delta.stop_reason == "end_turn"


async def test_a_ping_follows_the_beginning(served: Served):
    headers = {"x-api-key": "secret"}
    async with served.http.post(
        f"{served.url}/v1/messages", json={**ASK, "stream": True}, headers=headers
    ) as got:
        raw = (await got.read()).decode()
        assert got.headers["request-id"] == got.headers["X-Request-Id"]
    frames = raw.split("\n\n")
    assert frames[1] == 'event: ping\ndata: {"type":"ping"}'
    assert frames[-2] == 'event: message_stop\ndata: {"type":"message_stop"}'


async def test_stream_helper_assembles_the_message(client: AsyncAnthropic):
    async with client.messages.stream(**ASK) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert (text, final.content[0].text, final.stop_reason) == (TEXT, TEXT, "end_turn")


@pytest.mark.parametrize("streamed", [False, True])
async def test_ends_are_told_by_their_reason(client: AsyncAnthropic, streamed: bool):
    async def ask(**fields: object) -> anthropic.types.Message:
        if not streamed:
            return await client.messages.create(**{**ASK, **fields})
        async with client.messages.stream(**{**ASK, **fields}) as stream:
            return await stream.get_final_message()

    stopped = await ask(stop_sequences=["never", " yes"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "ok 😀",
        "stop_sequence",
        " yes",
    )
    cut = await ask(max_tokens=1)
    assert (cut.stop_reason, cut.usage.output_tokens, cut.stop_sequence) == ("max_tokens", 1, None)


async def test_cached_tokens_are_counted_apart(client: AsyncAnthropic, served: Served):
    def cached(request: GenerateRequest) -> list[TokenEvent | Exception]:
        first, *rest = answer()(request)
        return [replace(first, cached_tokens=16), *rest]

    served.engine.script = cached
    usage = (await client.messages.create(**ASK)).usage
    assert usage.cache_read_input_tokens == 16
    assert usage.input_tokens + 16 == len(served.engine.requests[0].prompt_token_ids)


async def test_count_tokens_is_what_the_message_will_cost(client: AsyncAnthropic, served: Served):
    asked = {"model": "toy", "system": "Be brief", "messages": [*ASK["messages"], *ASK["messages"]]}
    counted = await client.messages.count_tokens(**asked)
    made = await client.messages.create(**asked, max_tokens=9)
    assert counted.input_tokens == made.usage.input_tokens
    assert prompt_of(served).count("Hello\nHello") == 1


async def test_system_and_turns_reach_the_template(client: AsyncAnthropic, served: Served):
    text = {"type": "text", "cache_control": {"type": "ephemeral"}}
    await client.messages.create(
        model="toy",
        max_tokens=9,
        extra_body={"temperature": 0.5, "top_k": 7},
        system=[{**text, "text": "one"}, {**text, "text": "two"}],
        messages=[
            {"role": "user", "content": [{**text, "text": "a"}, {**text, "text": "b"}]},
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {**text, "text": "c"}],
            },
            {"role": "user", "content": "d"},
        ],
    )
    assert prompt_of(served) == (
        "<|im_start|>system\none\ntwo<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 7, 9)


async def test_an_assistant_message_at_the_end_is_continued(client: AsyncAnthropic, served: Served):
    opened = [*ASK["messages"], {"role": "assistant", "content": "The answer is"}]
    made = await client.messages.create(**{**ASK, "messages": opened})
    assert prompt_of(served).endswith("assistant\nThe answer is")
    assert made.content[0].text == TEXT


async def test_models_are_listed_for_both_clients(client: AsyncAnthropic):
    (listed,) = [model async for model in await client.models.list()]
    one = await client.models.retrieve("toy")
    assert (listed.id, listed.type, one.display_name) == ("toy", "model", "toy")


async def test_errors_are_the_clients_own_exceptions(client: AsyncAnthropic, served: Served):
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    for wrong, says in (
        ({"max_tokens": 0}, "max_tokens: "),
        ({"extra_body": {"max_token": 3}}, "max_token: is not a known field"),
        ({"extra_body": {"temperature": -1}}, "temperature: "),
        ({"messages": [{"role": "user", "content": [image]}]}, r"messages\[0\].content\[0\].type: 'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role: "),
        (
            {"messages": [{"role": "user", "content": "word " * 500}]},
            "prompt is too long: it has 1016 tokens",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type: 'bash_20250124'"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools: "),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: needs tools"),
        ({"system": [image]}, r"system\[0\].type: 'image'"),
        ({"extra_body": {"thinking": {"type": "enabled"}}}, "thinking: this model's chat template has no"),
        ({"output_config": {"effort": "low"}}, "output_config.effort: this model's chat template has no"),
        (
            {"extra_body": {"thinking": {"type": "enabled"}, "output_config": {"format": None}}},
            "thinking: this model's chat template has no",
        ),
    ):
        with pytest.raises(anthropic.BadRequestError, match=says) as bad:
            await client.messages.create(**{**ASK, **wrong})
        assert bad.value.body["error"]["type"] == "invalid_request_error"
        assert bad.value.body["request_id"] == bad.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: is required"):
        await client.post("/v1/messages", body={"messages": ASK["messages"]}, cast_to=object)
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        await client.messages.create(**{**ASK, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**ASK)
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("claude")
    served.engine.script = lambda request: [Overloaded("the queue is full")]
    with pytest.raises(anthropic.RateLimitError, match="queue"):
        await client.messages.create(**ASK, stream=True)

    def half(request: GenerateRequest) -> list[TokenEvent | Exception]:
        return [TokenEvent(request_id=request.request_id, token_ids=(70,)), EngineError("the step failed")]

    served.engine.script = half
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        async for _ in await client.messages.create(**ASK, stream=True):
            pass
    with pytest.raises(anthropic.InternalServerError):
        await client.messages.create(**ASK)


async def test_leaving_ends_the_sequence(client: AsyncAnthropic, served: Served):
    served.engine.script = lambda request: (
        [TokenEvent(request_id=request.request_id, token_ids=(10,))] * 100_000
    )
    served.engine.step_s = 0.02
    async with client.messages.stream(**{**ASK, "max_tokens": 290}) as stream:
        async for _ in stream:
            break
    task = asyncio.create_task(client.messages.create(**{**ASK, "max_tokens": 290}))
    while len(served.engine.requests) < 2:
        await asyncio.sleep(0.005)
    task.cancel()
    async with asyncio.timeout(3):
        while served.engine.running:
            await asyncio.sleep(0.01)
    assert len(served.engine.aborted) == 2
