"""POST /v1/messages with Anthropic's own client, streamed and whole."""

from collections.abc import AsyncIterator

import pytest
from anthropic import AsyncAnthropic

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
