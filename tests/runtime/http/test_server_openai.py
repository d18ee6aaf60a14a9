"""The official client, unmodified, against a real port."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from ostinato.errors import EngineError
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from tests.support.fake_engine import say
from tests.support.serving import Served, serving
from tests.support.toy_text import tokenizer

TEXT = "ok 😀 yes"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    ids = tokenizer().encode(TEXT, add_special_tokens=False).ids
    async with serving(say(ids, stop_id=1), api_key="secret", window=200) as running:
        yield running


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="secret", base_url=f"{served.url}/v1", max_retries=0) as made:
        yield made


async def test_chat_whole_and_sent_back(client: AsyncOpenAI):
    answer = await client.chat.completions.create(model="toy", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    history = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "more"}]
    again = await client.chat.completions.create(model="toy", messages=history)
    assert again.choices[0].message.content == TEXT


async def test_chat_streamed_with_usage_and_logprobs(client: AsyncOpenAI):
    stream = await client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, logprobs=True, top_logprobs=2,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, raw, usage = "", b"", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for entry in choice.logprobs.content if choice.logprobs else []:
                raw += bytes(entry.bytes)
                assert len(entry.top_logprobs) == 2
    assert (text, raw.decode()) == (TEXT, TEXT)
    assert usage.completion_tokens > 0


async def test_stream_helper_assembles_the_message(client: AsyncOpenAI):
    async with client.chat.completions.stream(model="toy", messages=MESSAGES, n=2) as stream:
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [TEXT, TEXT]


async def test_completions_with_logprobs(client: AsyncOpenAI):
    answer = await client.completions.create(model="toy", prompt=["a", "b"], logprobs=1, max_tokens=50)
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)
    stream = await client.completions.create(model="toy", prompt="a", stream=True, max_tokens=50)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_models(client: AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["toy"]
    assert (await client.models.retrieve("toy")).id == "toy"


async def test_errors_are_the_clients_own_exceptions(client: AsyncOpenAI, served: Served):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="toy", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()

    def half(request: GenerateRequest) -> list[TokenEvent | Exception]:
        return [TokenEvent(request_id=request.request_id, token_ids=(70,)), EngineError("the step failed")]

    served.engine.script = half
    stream = await create(model="toy", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        async for _ in stream:
            pass
