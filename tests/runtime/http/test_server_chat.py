"""POST /v1/chat/completions: what a client reads, streamed and whole."""

import json

import pytest

from ostinato.errors import EngineError, Overloaded
from ostinato.runtime.messages import GenerateRequest, SamplingParams, TokenEvent
from tests.support.fake_engine import Script, say
from tests.support.serving import serving
from tests.support.toy_text import front_end, tokenizer

CHAT = "/v1/chat/completions"
ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}
EMOJI = "ok 😀 yes"


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def answer(text: str = EMOJI, *, chunk: int = 1) -> Script:
    return say(ids(text), stop_id=1, chunk=chunk)


def text_of(events: list, index: int = 0) -> str:
    chosen = [c for e in events if e != "[DONE]" for c in e.get("choices", []) if c["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in chosen)


async def test_whole_answer_is_the_text_without_the_stop_token():
    async with serving(answer()) as served:
        status, body = await served.post(CHAT, ASK)
        assert status == 200
        assert (body["object"], body["model"]) == ("chat.completion", "toy")
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": EMOJI, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        prompt = len(served.engine.requests[0].prompt_token_ids)
        generated = len(ids(EMOJI)) + 1
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_stream_is_role_then_text_then_reason_then_usage_then_done():
    async with serving(answer()) as served:
        events = await served.events(CHAT, {**ASK, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1])
    assert text_of(chunks) == EMOJI
    assert chunks[-1]["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids(EMOJI)) + 1


async def test_stream_without_usage_has_no_usage_anywhere():
    async with serving(answer()) as served:
        events = await served.events(CHAT, ASK)
    assert not any("usage" in event for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_stop_string_is_never_shown_not_even_its_beginning():
    pieces = ["AB", "CD", "EFG", "H"]

    def script(request: GenerateRequest) -> list[TokenEvent]:
        name = request.request_id
        return [TokenEvent(request_id=name, token_ids=tuple(ids(piece))) for piece in [*pieces, "and on"]]

    async with serving(script) as served:
        events = await served.events(CHAT, {**ASK, "stop": ["DEFGH"]})
        assert text_of(events) == "ABC"
        assert not any("D" in json.dumps(e["choices"][0]["delta"]) for e in events[:-1])
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        _, whole = await served.post(CHAT, {**ASK, "stop": "DEFGH"})
        assert whole["choices"][0]["message"]["content"] == "ABC"
        assert len(served.engine.aborted) == 2  # the engine would have gone on


async def test_every_field_reaches_the_engine():
    fields = {
        "max_completion_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4,
        "logit_bias": {"5": -7}, "seed": 11, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": True, "top_logprobs": 2,
        "prompt_logprobs": 1, "allowed_token_ids": [5, 9], "bad_words": ["fox"],
    }  # fmt: skip
    async with serving(answer()) as served:
        status, _ = await served.post(CHAT, {**ASK, **fields, "priority": -3, "cache_salt": "salt"})
        request = served.engine.requests[0]
    assert status == 200
    given = {name: fields[name] for name in fields if name not in ("max_completion_tokens", "top_logprobs")}
    words = (tuple(ids("fox")), tuple(ids(" fox")))
    assert request.sampling == SamplingParams.model_validate(
        {
            **given,
            **{"max_tokens": 7, "logit_bias": {5: -7.0}, "stop": ("x",), "stop_token_ids": (9,)},
            **{"logprobs": 2, "allowed_token_ids": (5, 9), "bad_words": ("fox",), "bad_word_ids": words},
        }
    )
    assert (request.priority, request.cache_salt) == (-3, "salt")


async def test_defaults_come_from_the_generation_config_and_the_request_wins():
    async with serving(answer(), text=front_end(temperature=0.6, top_k=20)) as served:
        await served.post(CHAT, {**ASK, "temperature": 0})
        sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 20, 1.0)


async def test_n_choices_have_their_own_seed_text_and_usage():
    def script(request: GenerateRequest) -> list[TokenEvent]:
        return list(answer(f"number {request.sampling.seed}")(request))

    async with serving(script) as served:
        fields = {**ASK, "n": 3, "seed": 5}
        _, whole = await served.post(CHAT, fields)
        events = await served.events(CHAT, {**fields, "stream_options": {"include_usage": True}})
        generated = sum(len(ids(f"number {seed}")) + 1 for seed in (5, 6, 7))
        prompt = len(served.engine.requests[0].prompt_token_ids)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == ["number 5", "number 6", "number 7"]
    assert [text_of(events, index) for index in range(3)] == texts
    assert whole["usage"]["prompt_tokens"] == prompt
    assert whole["usage"]["completion_tokens"] == generated
    assert events[-2]["usage"] == whole["usage"]


async def test_unseeded_requests_get_different_seeds():
    async with serving(answer()) as served:
        await served.post(CHAT, {**ASK, "n": 4})
        assert len({request.sampling.seed for request in served.engine.requests}) == 4


async def test_logprobs_alone_give_each_token_and_no_alternatives():
    async with serving(answer()) as served:
        _, whole = await served.post(CHAT, {**ASK, "logprobs": True})
        events = await served.events(CHAT, {**ASK, "logprobs": True})
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5] * len(ids(EMOJI))
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == EMOJI
    assert not any("�" in entry["token"] for entry in content)
    choices = [event["choices"][0] for event in events[:-1]]
    streamed = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_impossible_alternatives_are_finite_numbers():
    async with serving(answer()) as served:
        fields = {**ASK, "logprobs": True, "top_logprobs": 5, "temperature": 0}
        status, whole = await served.post(CHAT, fields)  # `post` refuses NaN and Infinity
    assert status == 200
    top = whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.5, -9999.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize("top", [0, 20])
async def test_top_logprobs_up_to_the_limit_are_given(top: int):
    async with serving(answer("a")) as served:
        _, whole = await served.post(CHAT, {**ASK, "logprobs": True, "top_logprobs": top})
    assert len(whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == top


@pytest.mark.parametrize(
    ("max_tokens", "left"), [({}, True), ({"max_tokens": 10**9}, True), ({"max_completion_tokens": 2}, False)]
)
async def test_max_tokens_is_cut_to_the_window(max_tokens: dict[str, int], left: bool):
    async with serving(say([10] * 200, reason="length")) as served:
        _, whole = await served.post(CHAT, {**ASK, **max_tokens})
        room = 64 - len(served.engine.requests[0].prompt_token_ids)
    assert whole["usage"]["completion_tokens"] == (room if left else 2)
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_prompt_over_the_window_names_both_numbers_before_the_stream_begins():
    async with serving(answer()) as served:
        long = {**ASK, "messages": [{"role": "user", "content": "x " * 100}]}
        for fields in (long, {**long, "stream": True}):
            status, body = await served.post(CHAT, fields)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            _, counted = await served.post("/tokenize", {"messages": long["messages"]})
            assert f"{counted['count']} tokens" in body["error"]["message"]
            assert "64 tokens" in body["error"]["message"]
        assert served.engine.requests == []


async def test_tool_history_is_rendered_with_arguments_that_are_none_as_they_are():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with serving(answer(), window=200) as served:
        status, _ = await served.post(CHAT, {**ASK, "messages": messages})
        assert status == 200
        call["function"]["arguments"] = "{"
        status, _ = await served.post(CHAT, {**ASK, "messages": messages})
        assert status == 200
        decode = served.state.text.decode
        whole, broken = (decode(r.prompt_token_ids, skip_special=False) for r in served.engine.requests)
        assert '<tool_call>{"a": 1}</tool_call>' in whole
        assert '<tool_call>"{"</tool_call>' in broken


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_the_engine_is_a_status_even_for_a_stream(stream: bool):
    async with serving(lambda _: [Overloaded("the queue is full")]) as served:
        for n in (1, 3):
            async with served.http.post(
                served.url + CHAT, json={**ASK, "stream": stream, "n": n}
            ) as response:
                body = await response.json()
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert body["error"]["code"] == "overloaded"
        assert served.engine.running == {}


async def test_error_in_a_stream_is_one_event_and_the_end():
    def script(request: GenerateRequest) -> list[TokenEvent | Exception]:
        return [
            TokenEvent(request_id=request.request_id, token_ids=tuple(ids("half"))),
            EngineError("the step failed"),
        ]

    async with serving(script) as served:
        events = await served.events(CHAT, ASK)
        assert text_of(events) == "half"
        assert events[-1] == {
            "error": {
                "message": "the step failed",
                "type": "server_error",
                "param": None,
                "code": "engine_error",
            }
        }
        status, body = await served.post(CHAT, ASK)
        assert (status, body["error"]["code"]) == (500, "engine_error")


async def test_error_event_of_one_choice_ends_all_choices():
    def script(request: GenerateRequest) -> list[TokenEvent]:
        name = request.request_id
        if name.endswith("-1"):
            return [TokenEvent(request_id=name, finish_reason="error", error="NaN in row 3")]
        return [TokenEvent(request_id=name, token_ids=(10,)) for _ in range(1000)]

    async with serving(script, window=2000) as served:
        status, body = await served.post(CHAT, {**ASK, "n": 3})
        assert (status, body["error"]["message"]) == (500, "NaN in row 3")
        assert served.engine.running == {}


async def test_unexpected_exception_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture):
    async with serving(lambda _: [ZeroDivisionError("secret")]) as served:
        status, body = await served.post(CHAT, ASK)
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)
    assert "secret" in caplog.text
