"""POST /v1/completions: prompt forms, echo, log-probabilities, streamed and whole."""

from itertools import pairwise
from typing import Any

import pytest

from tests.support.fake_engine import Script, say
from tests.support.serving import serving
from tests.support.toy_text import front_end, tokenizer

PATH = "/v1/completions"
ASK = {"model": "toy", "prompt": "the quick", "max_tokens": 50}
WORDS = " brown fox 😀"


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def answer(text: str = WORDS, *, chunk: int = 1) -> Script:
    return say(ids(text), stop_id=1, chunk=chunk)


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """A stream's chunks put together as the choice of a whole answer."""
    chunks = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    logprobs = None
    if chunks[0]["logprobs"] is not None:
        keys = chunks[0]["logprobs"]
        logprobs = {key: [item for chunk in chunks for item in chunk["logprobs"][key]] for key in keys}
    return {
        "index": index,
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": logprobs,
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1]["stop_reason"],
    }


async def test_whole_answer_and_stream_say_the_same():
    async with serving(answer()) as served:
        status, whole = await served.post(PATH, ASK)
        events = await served.events(PATH, {**ASK, "stream_options": {"include_usage": True}})
    assert status == 200
    assert whole["object"] == "text_completion"
    end = {"finish_reason": "stop", "stop_reason": None}
    assert whole["choices"] == [{"index": 0, "text": WORDS, "logprobs": None, **end}]
    assert joined(events) == whole["choices"][0]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == len(ids("the quick"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the dog", [ids("the dog")]),
        (["the dog", "fox"], [ids("the dog"), ids("fox")]),
        ([10, 11], [[10, 11]]),
        ([[10, 11], [12]], [[10, 11], [12]]),
    ],
    ids=["text", "texts", "ids", "id lists"],
)
async def test_all_prompt_forms_reach_the_engine(prompt: object, expected: list[list[int]]):
    async with serving(answer()) as served:
        _, whole = await served.post(PATH, {**ASK, "prompt": prompt, "n": 2})
        asked = [list(request.prompt_token_ids) for request in served.engine.requests]
    assert asked == [prompt_ids for prompt_ids in expected for _ in range(2)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * len(expected)))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_default_is_sixteen_tokens():
    async with serving(say([10] * 60)) as served:
        _, whole = await served.post(PATH, {"prompt": "a"})
        assert whole["usage"]["completion_tokens"] == 16
        await served.post(PATH, {"prompt": "a", "min_tokens": 20})
        assert served.engine.requests[-1].sampling.max_tokens == 20


@pytest.mark.parametrize(
    ("length", "max_tokens", "generated"), [(60, 10, 4), (60, 1_000_000_000, 4), (60, 3, 3), (63, 10, 1)]
)
async def test_max_tokens_is_an_upper_bound_cut_to_the_window(length: int, max_tokens: int, generated: int):
    async with serving(say([10] * 100)) as served:
        status, whole = await served.post(PATH, {"prompt": [10] * length, "max_tokens": max_tokens})
    assert (status, whole["usage"]["completion_tokens"]) == (200, generated)
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_fills_the_window_is_refused_with_both_numbers(stream: bool):
    async with serving(say([10])) as served:
        status, body = await served.post(PATH, {"prompt": [10] * 64, "max_tokens": 1, "stream": stream})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "it has 64 tokens" in body["error"]["message"]
    assert "length is 64 tokens" in body["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([410], "prompt"),
        ([[1], [2**31 - 1]], "prompt[1]"),
    ],
)
async def test_empty_prompts_and_foreign_tokens_are_refused(prompt: object, param: str):
    async with serving(answer(), text=front_end(add_bos=True)) as served:
        status, body = await served.post(PATH, {**ASK, "prompt": prompt})
        assert (status, body["error"]["param"]) == (400, param)
        assert served.engine.requests == []


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_offsets_slice_the_text_into_the_tokens(chunk: int):
    async with serving(answer(" brown fox dog", chunk=chunk)) as served:
        fields = {**ASK, "logprobs": 2}
        _, whole = await served.post(PATH, fields)
        events = await served.events(PATH, fields)
    choice = whole["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    offsets = logprobs["text_offset"]  # the last is that of EOS, which the text does not have
    assert offsets == sorted(set(offsets))
    assert (offsets[-1], logprobs["tokens"][-1]) == (len(text), "<|im_end|>")
    assert [text[a:b] for a, b in pairwise(offsets)] == logprobs["tokens"][:-1]
    assert logprobs["token_logprobs"] == [-0.5] * (len(ids(" brown fox dog")) + 1)
    assert joined(events) == choice


async def test_tokens_of_one_character_are_named_by_their_bytes():
    async with serving(answer("a😀")) as served:
        _, whole = await served.post(PATH, {**ASK, "logprobs": 0})
    logprobs = whole["choices"][0]["logprobs"]
    emoji = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert logprobs["tokens"] == ["a", *emoji, "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]


async def test_top_logprobs_hold_the_chosen_token_and_are_finite():
    async with serving(answer("a")) as served:
        _, whole = await served.post(PATH, {**ASK, "logprobs": 3, "top_k": 1, "temperature": 1})
        _, chosen_only = await served.post(PATH, {**ASK, "logprobs": 0})
    top = {"a": -0.5, "<|im_end|>": -9999.0, "!": -2.0}
    assert whole["choices"][0]["logprobs"]["top_logprobs"][0] == top
    assert chosen_only["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"<|im_end|>": -0.5}]


@pytest.mark.parametrize("prompt", ["the quick", ids("the quick")], ids=["text", "ids"])
async def test_echo_puts_the_prompt_in_front_of_text_tokens_and_offsets(prompt: object):
    async with serving(answer(" brown")) as served:
        fields = {**ASK, "prompt": prompt, "echo": True, "logprobs": 1}
        status, whole = await served.post(PATH, fields)
        events = await served.events(PATH, fields)
        assert served.engine.requests[0].sampling.prompt_logprobs == 1
    assert status == 200
    choice = whole["choices"][0]
    assert choice["text"] == "the quick brown"
    logprobs, total = choice["logprobs"], len(ids("the quick")) + len(ids(" brown")) + 1
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (total - 1)
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == "the quick brown<|im_end|>"
    assert len(set(logprobs["text_offset"])) == total
    assert joined(events) == choice
    assert whole["usage"]["completion_tokens"] == len(ids(" brown")) + 1


@pytest.mark.parametrize("prompt", [[333], [333, 354], [410 - 1] * 5])
async def test_scoring_by_echo_finds_every_token_of_the_prompt_whatever_is_generated(prompt: list[int]):
    """lm-eval reads `token_logprobs[context:-1]`, so one generated token must be there, EOS too."""
    lengths = []
    for script in (say([], stop_id=1), say([10], reason="length")):
        async with serving(script) as served:
            fields = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
            _, whole = await served.post(PATH, fields)
            assert joined(await served.events(PATH, fields)) == whole["choices"][0]
        logprobs = whole["choices"][0]["logprobs"]
        lengths += [len(one) for one in logprobs.values()]
    assert lengths == [len(prompt) + 1] * 8


async def test_a_stop_string_cuts_the_rows_of_what_is_behind_it():
    async with serving(answer(" brown fox dog")) as served:
        _, whole = await served.post(PATH, {**ASK, "logprobs": 0, "stop": [" fox"]})
    assert whole["choices"][0]["text"] == " brown"
    assert "".join(whole["choices"][0]["logprobs"]["tokens"]) == " brown"


async def test_echo_lists_an_added_bos_without_width():
    async with serving(answer(" brown"), text=front_end(add_bos=True)) as served:
        _, whole = await served.post(PATH, {**ASK, "echo": True, "logprobs": 0})
    choice = whole["choices"][0]
    assert choice["text"] == "the quick brown"
    assert choice["logprobs"]["tokens"][0] == "<|im_start|>"
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]


async def test_echo_of_several_prompts_goes_with_their_choices():
    async with serving(answer("!")) as served:
        fields = {**ASK, "prompt": ["the dog", "fox"], "echo": True, "n": 2}
        _, whole = await served.post(PATH, fields)
        events = await served.events(PATH, fields)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["the dog!", "the dog!", "fox!", "fox!"]
    assert [joined(events, index)["text"] for index in range(4)] == texts


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"return_token_ids": True}, {"prompt_logprobs": 2}])
async def test_echo_without_generating_scores_the_prompt_and_says_nothing_else(extra: dict[str, object]):
    async with serving(answer()) as served:
        fields = {**ASK, "echo": True, "max_tokens": 0, "logprobs": 1, **extra}
        status, whole = await served.post(PATH, fields)
        events = await served.events(PATH, {**fields, "stream_options": {"include_usage": True}})
        assert {request.sampling.max_tokens for request in served.engine.requests} == {1}
        status_without, body = await served.post(PATH, {**ASK, "max_tokens": 0})
    assert (status, status_without, body["error"]["param"]) == (200, 400, "max_tokens")
    for choice in whole["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("the quick", "length")
        values = choice["logprobs"]["token_logprobs"]
        assert values == [None] + [-0.5] * (len(ids("the quick")) - 1)
        assert len(choice["logprobs"]["tokens"]) == len(values)
        assert choice.get("token_ids", []) == []
        plain = {key: choice[key] for key in joined(events, choice["index"])}
        assert joined(events, choice["index"]) == plain
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] == len(ids("the quick"))
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 17}, "best_of"),
        ({"prompt": ["a"] * 600, "best_of": 2}, "best_of"),
        ({"allowed_token_ids": [5, 410]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "logit_bias": {"5": -100}}, "allowed_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": [410]}, "logprob_token_ids"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"min_tokens": 51}, "min_tokens"),
        ({"logit_bias": {"410": 1}}, "logit_bias"),
        ({"stop_token_ids": [410]}, "stop_token_ids"),
        ({"prompt": ["a"] * 1024, "n": 2}, "n"),
    ],
)
async def test_limits_of_server_and_model_name_the_field(fields: dict[str, object], param: str):
    async with serving(answer()) as served:
        status, body = await served.post(PATH, {**ASK, **fields})
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("include", [True, False])
async def test_stop_string_is_included_only_when_asked_for(include: bool):
    async with serving(answer(" brown fox jumps")) as served:
        _, whole = await served.post(PATH, {**ASK, "stop": ["fox"], "include_stop_str_in_output": include})
    assert whole["choices"][0]["text"] == (" brown fox" if include else " brown ")
    assert whole["choices"][0]["finish_reason"] == "stop"
