"""The official clients of the Responses and Messages APIs against a compiled model: all three APIs agree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from tests.support.server_process import ServerProcess, serving

CHAT: list[Any] = [{"role": "user", "content": "hello there"}]
OURS = {"seed": 7, "temperature": 1.2}


class Verdict(BaseModel):
    """What a structured answer must be."""

    color: Literal["red", "green"]
    sure: bool


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, tiny_artifact, "--server.served-name=tiny", "--server.api-key=k") as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(api_key="k", base_url=f"{server.url}/v1", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def anthropic(server: ServerProcess) -> Iterator[Anthropic]:
    with Anthropic(api_key="k", base_url=server.url, max_retries=0) as made:
        yield made


def test_one_seed_gives_one_text_through_every_api(openai, anthropic):
    chat = openai.chat.completions.create(model="tiny", messages=CHAT, max_tokens=40, seed=7, temperature=1.2)
    text = chat.choices[0].message.content
    asked = {"model": "tiny", "input": CHAT, "max_output_tokens": 40, "extra_body": OURS}
    whole = openai.responses.create(**asked)
    with openai.responses.create(**asked, stream=True) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    message = anthropic.messages.create(model="tiny", messages=CHAT, max_tokens=40, extra_body=OURS)
    with anthropic.messages.stream(model="tiny", messages=CHAT, max_tokens=40, extra_body=OURS) as told:
        streamed = told.get_final_message()
    assert len(text) > 20
    assert [whole.output_text, "".join(pieces), message.content[0].text, streamed.content[0].text] == [
        text
    ] * 4
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == message.usage.output_tokens == chat.usage.completion_tokens
    usage = streamed.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    counted = anthropic.messages.count_tokens(model="tiny", messages=CHAT)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_stop_sequence_cuts_the_text_and_is_named(anthropic):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 60}
    greedy = {"temperature": 0, "ignore_eos": True}
    text = anthropic.messages.create(**asked, extra_body=greedy).content[0].text
    stop = text[len(text) // 2 :][:3]
    cut = anthropic.messages.create(**asked, extra_body=greedy, stop_sequences=["never there", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def test_a_stored_conversation_goes_on_as_one_that_is_sent(openai):
    first = openai.responses.create(model="tiny", input="hello", max_output_tokens=12, extra_body=OURS)
    again = {"model": "tiny", "max_output_tokens": 12, "extra_body": OURS}
    by_id = openai.responses.create(**again, input="more", previous_response_id=first.id)
    sent = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "more"}]
    by_items = openai.responses.create(**again, input=sent)
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > first.usage.input_tokens
    assert openai.responses.retrieve(by_id.id).output_text == by_id.output_text


def test_structured_answers_parse(openai, anthropic):
    parsed = openai.responses.parse(
        model="tiny", input="hello", text_format=Verdict, max_output_tokens=200, extra_body={"temperature": 0}
    )
    assert isinstance(parsed.output_parsed, Verdict)
    message = anthropic.messages.create(
        model="tiny",
        messages=CHAT,
        max_tokens=200,
        output_config={"format": {"type": "json_schema", "schema": Verdict.model_json_schema()}},
        extra_body={"temperature": 0},
    )
    assert isinstance(Verdict.model_validate_json(message.content[0].text), Verdict)


def test_who_leaves_or_cancels_gives_everything_back(openai, anthropic, server):
    forever = {"ignore_eos": True}
    with openai.responses.create(model="tiny", input="x", stream=True, extra_body=forever) as stream:
        next(iter(stream))
    with anthropic.messages.stream(model="tiny", messages=CHAT, max_tokens=9000, extra_body=forever) as told:
        next(iter(told))
    held = openai.responses.create(model="tiny", input="x", background=True, extra_body=forever)
    assert openai.responses.cancel(held.id).status == "cancelled"
    server.wait_idle()
