"""POST /v1/responses with OpenAI's own client: whole, streamed, sent back, stored."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from ostinato.errors import EngineError, Overloaded
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from tests.support.fake_engine import Script, say
from tests.support.serving import Served, serving
from tests.support.toy_text import tokenizer

TEXT = "ok 😀 yes"


def answer(text: str = TEXT) -> Script:
    return say(tokenizer().encode(text, add_special_tokens=False).ids, stop_id=1)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(answer(), api_key="secret,other", window=400) as running:
        yield running


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="secret", base_url=f"{served.url}/v1", max_retries=0) as made:
        yield made


def prompt_of(served: Served) -> str:
    return tokenizer().decode(list(served.engine.requests[-1].prompt_token_ids), skip_special_tokens=False)


async def test_whole_response(client: AsyncOpenAI, served: Served):
    made = await client.responses.create(
        model="toy", input="Hello", instructions="Be brief", max_output_tokens=50, metadata={"a": "b"}
    )
    assert (made.output_text, made.status, made.error, made.incomplete_details) == (
        TEXT,
        "completed",
        None,
        None,
    )
    assert (made.metadata, made.instructions, made.max_output_tokens) == ({"a": "b"}, "Be brief", 50)
    assert "system\nBe brief<|im_end|>\n<|im_start|>user\nHello" in prompt_of(served)
    asked, generated = (
        served.engine.requests[0],
        len(tokenizer().encode(TEXT, add_special_tokens=False).ids) + 1,
    )
    assert asked.sampling.max_tokens == 50
    assert made.usage.input_tokens == len(asked.prompt_token_ids)
    assert (made.usage.output_tokens, made.usage.total_tokens) == (
        generated,
        generated + len(asked.prompt_token_ids),
    )


async def test_stream_has_the_documented_events_in_order(client: AsyncOpenAI):
    stream = await client.responses.create(model="toy", input="Hello", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == TEXT
    last = events[-1].response
    assert last.output_text == TEXT
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert (await client.responses.retrieve(last.id)).output_text == TEXT


async def test_stream_helper_assembles_the_response(client: AsyncOpenAI):
    async with client.responses.stream(model="toy", input="Hello") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == TEXT


async def test_a_conversation_goes_on_by_id_and_by_sending_items_back(client: AsyncOpenAI, served: Served):
    first = await client.responses.create(model="toy", input="Hello", instructions="Be brief")
    second = await client.responses.create(model="toy", input="More", previous_response_id=first.id)
    by_id = prompt_of(served)
    assert f"user\nHello<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>user\nMore" in by_id
    assert "Be brief" not in by_id
    items = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "More"}]
    await client.responses.create(model="toy", input=items, store=False)
    assert prompt_of(served) == by_id
    reference = [items[0], {"type": "item_reference", "id": first.output[0].id}, items[-1]]
    await client.responses.create(model="toy", input=reference)
    assert prompt_of(served) == by_id
    await client.responses.create(model="toy", input="Third", previous_response_id=second.id)
    assert by_id.rstrip("\n") in prompt_of(served)
    listed = await client.responses.input_items.list(second.id)
    assert [[part.text for part in item.content] for item in listed.data] == [["More"]]


async def test_input_tokens_are_what_the_response_will_cost(client: AsyncOpenAI, served: Served):
    for asked in (
        {"input": "Hello"},
        {"input": [{"role": "user", "content": "Hello"}], "instructions": "Be brief"},
        {"input": "More", "previous_response_id": (await client.responses.create(input="Hello")).id},
    ):
        counted = await client.responses.input_tokens.count(model="toy", **asked)
        made = await client.responses.create(model="toy", **asked)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == made.usage.input_tokens
        assert counted.input_tokens == len(served.engine.requests[-1].prompt_token_ids)
    with pytest.raises(openai.NotFoundError, match="resp_x"):
        await client.responses.input_tokens.count(input="x", previous_response_id="resp_x")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens: is not a known field"):
        await client.responses.input_tokens.count(input="x", extra_body={"max_output_tokens": 3})


async def test_listed_messages_have_parts_whatever_the_client_sent(client: AsyncOpenAI):
    said = ["Hello", [{"type": "input_text", "text": "again"}]]
    items = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": "Hi"}]
    made = await client.responses.create(model="toy", input=[*items, {"role": "user", "content": said[1]}])
    listed = (await client.responses.input_items.list(made.id, order="asc")).data
    assert [[(part.type, part.text) for part in item.content] for item in listed] == [
        [("input_text", "Hello")],
        [("output_text", "Hi")],
        [("input_text", "again")],
    ]
    assert listed[1].content[0].annotations == []


async def test_a_response_is_there_until_deleted_and_for_its_key_only(client: AsyncOpenAI, served: Served):
    made = await client.responses.create(model="toy", input="Hello")
    with pytest.raises(openai.NotFoundError):
        await client.with_options(api_key="other").responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(made.id)
    await client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(made.id)
        assert missing.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError, match="previous_response_id: response") as missing:
        await client.responses.create(model="toy", input="x", previous_response_id=made.id)
    assert missing.value.param == "previous_response_id"
    unstored = await client.responses.create(model="toy", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)


async def test_the_end_for_want_of_tokens_is_incomplete(client: AsyncOpenAI):
    made = await client.responses.create(model="toy", input="Hello", max_output_tokens=2)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"
    stream = await client.responses.create(model="toy", input="Hello", max_output_tokens=2, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == made.output_text


INCLUDED = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("wanted", "top"),
    [({**INCLUDED, "top_logprobs": 2}, 2), (INCLUDED, 0), ({"top_logprobs": 2}, 2)],
    ids=["both", "included", "top"],
)
async def test_log_probabilities_are_listed_when_asked_for(client: AsyncOpenAI, wanted: dict, top: int):
    asked = {"model": "toy", "input": "Hello", **wanted}
    made = await client.responses.create(**asked)
    whole = made.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in whole).decode() == TEXT
    assert all(len(entry.top_logprobs) == top for entry in whole)
    streamed = [event async for event in await client.responses.create(**asked, stream=True)]
    told = [e for event in streamed if event.type == "response.output_text.delta" for e in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in whole]


async def test_a_background_response_is_polled_streamed_again_and_cancelled(
    client: AsyncOpenAI, served: Served
):
    made = await client.responses.create(model="toy", input="Hello", background=True)
    assert made.status == "in_progress"
    while (now := await client.responses.retrieve(made.id)).status == "in_progress":
        await asyncio.sleep(0.01)
    assert (now.status, now.output_text) == ("completed", TEXT)
    stream = await client.responses.create(model="toy", input="Hello", background=True, stream=True)
    events = [event async for event in stream]
    again = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=2)
    assert [event.model_dump() async for event in again] == [event.model_dump() for event in events[3:]]
    served.engine.gate = asyncio.Event()
    held = await client.responses.create(model="toy", input="Hello", background=True)
    stopped = await client.responses.cancel(held.id)
    assert stopped.status == "cancelled"
    assert (await client.responses.cancel(held.id)).status == "cancelled"
    assert not served.engine.running


async def test_a_cancelled_response_is_told_though_the_store_has_no_room_for_it():
    async with serving(answer(), window=400, store_mib=0.001) as served:
        served.engine.gate = asyncio.Event()
        status, held = await served.post("/v1/responses", {"input": "Hello " * 100, "background": True})
        assert (status, held["status"]) == (200, "in_progress")
        status, stopped = await served.post(f"/v1/responses/{held['id']}/cancel", {})
        assert (status, stopped["status"]) == (200, "cancelled")
        assert not served.engine.running


async def test_errors_are_the_clients_own_exceptions(client: AsyncOpenAI, served: Served):
    create = client.responses.create
    for wrong, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"truncation": "auto"}, "truncation"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "none"}]},
            "input[1].id",
        ),
        (
            {"input": [{"role": "user", "content": text, "id": "msg_1", "type": "message"} for text in "ab"]},
            "input[1].id",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": "word " * 500}, "input"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            await create(**{"model": "toy", "input": "Hello", **wrong})
        assert bad.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", input="x")
    assert missing.value.code == "model_not_found"
    served.engine.script = lambda request: [Overloaded("the queue is full")]
    with pytest.raises(openai.RateLimitError):
        await create(model="toy", input="x", stream=True)

    def half(request: GenerateRequest) -> list[TokenEvent | Exception]:
        return [TokenEvent(request_id=request.request_id, token_ids=(70,)), EngineError("the step failed")]

    served.engine.script = half
    events = [event async for event in await create(model="toy", input="x", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the step failed"
    with pytest.raises(openai.InternalServerError):
        await create(model="toy", input="x")


async def test_leaving_a_stream_ends_the_sequence(client: AsyncOpenAI, served: Served):
    served.engine.script = lambda request: (
        [TokenEvent(request_id=request.request_id, token_ids=(10,))] * 100_000
    )
    served.engine.step_s = 0.002
    stream = await client.responses.create(
        model="toy", input="x", extra_body={"ignore_eos": True}, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(3):
        while served.engine.running:
            await asyncio.sleep(0.01)


async def test_a_background_response_counts_among_the_requests_of_its_key_and_ends_with_the_server():
    limits = {"concurrent": 1}
    async with serving(answer(), window=400, limits=limits, drain_s=0.05) as served:
        served.engine.gate = asyncio.Event()
        _, held = await served.post("/v1/responses", {"input": "Hello", "background": True})
        status, body = await served.post("/v1/responses", {"input": "Hello"})
        assert (status, body["error"]["code"]) == (429, "rate_limited")
        served.engine.gate.set()
        while (now := (await served.get(f"/v1/responses/{held['id']}"))[1])["status"] == "in_progress":
            await asyncio.sleep(0.01)
        assert now["output"][0]["content"][0]["text"] == TEXT
        served.engine.gate = asyncio.Event()
        last = (await served.post("/v1/responses", {"input": "Hello", "background": True}))[1]
        (running,) = served.state.keys.callers.values()
        assert running.allowance.running == 1
        assert last["status"] == "in_progress"
        served.stop.set()
        async with asyncio.timeout(5):
            await served.task
        assert (served.engine.running, running.allowance.running) == ({}, 0)


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", "stream=yes", "stream"),
        ("", "starting_after=2147483649", "starting_after"),  # also where nothing is streamed
        ("", "starting_after=-1", "starting_after"),
        ("", "stream=false&starting_after=x", "starting_after"),
        ("/input_items", "limit=0", "limit"),
        ("/input_items", "limit=101", "limit"),
        ("/input_items", "order=up", "order"),
    ],
)
async def test_wrong_query_parameters_are_refused_whatever_else_is_asked(
    served: Served, path: str, query: str, param: str
):
    key = {"Authorization": "Bearer secret"}
    _, made = await served.post("/v1/responses", {"input": "a"}, **key)
    for name in (made["id"], "resp_nothing"):
        status, body = await served.get(f"/v1/responses/{name}{path}?{query}", **key)
        assert (status, body["error"]["param"]) == (400, param)
