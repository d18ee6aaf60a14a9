"""The official client against a compiled model: what streams is what comes whole, and what Python gives."""

import math
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from tests.support.server_process import ServerProcess, serving
from tests.support.tiny_models import EOS_ID

CHAT = [{"role": "user", "content": "hello there"}]
SMILE = "😀"


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server"), tiny_artifact, "--server.served-name=tiny") as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(tiny_artifact: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_artifact / "tokenizer" / "tokenizer.json"))


def test_the_server_and_python_give_the_same_answer(client, tiny_artifact, tokenizer):
    prompt = tokenizer.encode("the quick brown fox").ids
    served = client.completions.create(model="tiny", prompt=prompt, max_tokens=48, temperature=0)
    with LLM(tiny_artifact) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=48))
    assert served.choices[0].text == output.outputs[0].text
    assert served.choices[0].finish_reason == output.outputs[0].finish_reason
    assert served.usage.completion_tokens == len(output.outputs[0].token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_streamed_and_whole_chats_of_one_seed_are_equal(client, temperature):
    asked = {
        "model": "tiny", "messages": CHAT, "temperature": temperature, "seed": 11, "n": 3, "max_tokens": 60,
        "logprobs": True, "top_logprobs": 3, "extra_body": {"skip_special_tokens": False},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, tokens, reasons, usage = [""] * 3, [[], [], []], [None] * 3, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert (len(set(texts)) == 1) == (temperature == 0)
    assert usage.completion_tokens == whole.usage.completion_tokens
    for got, choice in zip(tokens, whole.choices, strict=True):
        assert [entry.token for entry in got] == [entry.token for entry in choice.logprobs.content]
        raw = b"".join(bytes(entry.bytes) for entry in got)
        assert raw.decode(errors="replace") == choice.message.content


def test_parameters_that_only_extra_body_can_carry_reach_the_engine(client, tokenizer):
    prompt = tokenizer.encode("the quick brown fox").ids
    allowed = prompt[:3]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    assert plain.prompt_token_ids == prompt
    barred = plain.token_ids[0]
    other = client.completions.create(
        **asked, extra_body={"return_token_ids": True, "logit_bias": {str(barred): -100}}
    ).choices[0]
    assert barred not in other.token_ids
    few = client.completions.create(
        **asked,
        logprobs=0,
        extra_body={
            "return_token_ids": True,
            "allowed_token_ids": allowed,
            "logprob_token_ids": allowed,
            "prompt_logprobs": 1,
            "ignore_eos": True,
        },
    ).choices[0]
    assert set(few.token_ids) <= set(allowed)
    names = {tokenizer.decode([token]) for token in allowed}
    assert all(names <= set(best) for best in few.logprobs.top_logprobs)
    assert few.prompt_logprobs[0] is None
    assert all(str(token) in told for token, told in zip(prompt[1:], few.prompt_logprobs[1:], strict=True))
    scored = client.completions.create(**{**asked, "max_tokens": 0}, echo=True, logprobs=1)
    values = [
        told[str(token)]["logprob"] for token, told in zip(prompt[1:], few.prompt_logprobs[1:], strict=True)
    ]
    assert scored.choices[0].logprobs.token_logprobs == [None, *values]
    assert scored.usage.completion_tokens == 0


def test_bad_words_are_not_said(client, tokenizer):
    asked = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 40}
    told = {"return_token_ids": True, "ignore_eos": True}
    said = client.chat.completions.create(**asked, extra_body=told).choices[0].token_ids
    words = {token: tokenizer.decode([token]) for token in said}
    bad = [
        token
        for token, word in words.items()
        if tokenizer.encode(word, add_special_tokens=False).ids == [token]
    ]
    assert bad, "the model says no token that a text would have"
    other = client.chat.completions.create(
        **asked, extra_body={**told, "bad_words": [words[token] for token in bad]}
    )
    assert not set(bad) & set(other.choices[0].token_ids)


def test_the_best_of_several_is_the_likeliest_of_them(client):
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 8, "temperature": 1.5, "seed": 3, "logprobs": 0}
    every = client.completions.create(**asked, n=4, extra_body={"ignore_eos": True})
    best = client.completions.create(**asked, n=1, best_of=4, extra_body={"ignore_eos": True})
    means = [sum(choice.logprobs.token_logprobs) / 8 for choice in every.choices]
    assert best.choices[0].text == every.choices[means.index(max(means))].text
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_log_probabilities_are_those_of_a_distribution(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=20, logprobs=True, top_logprobs=20
    )
    for entry in answer.choices[0].logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert all(math.isfinite(value) and value <= 0 for value in values)
        assert values == sorted(values, reverse=True)
        assert values[0] == entry.logprob  # greedy
        assert 0.1 < sum(map(math.exp, values)) < 1.0001


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(client):
    asked = {"model": "tiny", "temperature": 1.0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    prompts = ["the lazy dog", "hello", "one two"]
    crowd = client.completions.create(**asked, prompt=prompts, n=2, seed=5).choices
    for choice, seed in zip(crowd[2:4], (5, 6), strict=True):
        alone = client.completions.create(**asked, prompt="hello", seed=seed).choices[0]
        assert choice.text == alone.text


def test_a_stop_string_ends_the_text_in_front_of_it(client):
    asked = {"model": "tiny", "prompt": "hello world", "temperature": 0, "max_tokens": 60}
    asked["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = text[: text.index(stop)]
    whole = client.completions.create(**asked, stop=[stop, "never there"]).choices[0]
    assert (whole.text, whole.finish_reason) == (cut, "stop")
    streamed = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut


def test_an_emoji_made_of_four_tokens_comes_in_one_piece(client, tokenizer):
    ids = tokenizer.encode(SMILE, add_special_tokens=False).ids
    assert len(ids) == 4
    # Each byte wins once: the highest bias first, and the penalty takes it out of the race.
    bias = {str(token): value for token, value in zip(ids, (99, 90, 80, 70), strict=True)}
    asked = {
        "model": "tiny", "prompt": "hello", "temperature": 0, "logit_bias": bias,
        "extra_body": {"repetition_penalty": 100, "ignore_eos": True},
    }  # fmt: skip
    pieces = client.completions.create(**asked, max_tokens=4, stream=True, logprobs=0)
    texts = [chunk.choices[0].text for chunk in pieces]
    assert [text for text in texts if text] == [SMILE]
    assert client.completions.create(**asked, max_tokens=3).choices[0].text == "\N{REPLACEMENT CHARACTER}"
    first = client.completions.create(**asked, max_tokens=4, logprobs=0).choices[0]
    assert first.text == SMILE
    assert first.logprobs.tokens[0] == r"bytes:\xf0"


def test_eos_ends_an_answer_and_is_not_shown(client):
    answer = client.completions.create(
        model="tiny",
        prompt="hello",
        logit_bias={str(EOS_ID): 100},
        max_tokens=9,
        extra_body={"min_tokens": 2},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    assert "im_end" not in answer.choices[0].text


def test_a_second_prompt_with_the_same_beginning_uses_the_cache(client, tokenizer):
    words = "five jumps over the lazy fox " * 20
    prompt = tokenizer.encode(words).ids
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 10}
    first = client.completions.create(**asked)
    again = client.completions.create(**asked)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert again.choices[0].text == first.choices[0].text
    salted = client.completions.create(**asked, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].text == first.choices[0].text


def test_bad_prompts_are_the_clients_exceptions(client):
    create = client.completions.create
    with pytest.raises(openai.BadRequestError, match="16384") as too_long:
        create(model="tiny", prompt=[5] * 16384)
    assert too_long.value.code == "context_length_exceeded"
    for empty in ("", [], [[]], [""]):
        with pytest.raises(openai.BadRequestError) as refused:
            create(model="tiny", prompt=empty)
        assert refused.value.param.startswith("prompt"), empty
    with pytest.raises(openai.BadRequestError) as unknown:
        create(model="tiny", prompt="a", extra_body={"heat": 1})
    assert unknown.value.param == "heat"
    with pytest.raises(openai.NotFoundError):
        create(model="other", prompt="a")


def test_a_prompt_up_to_the_window_is_answered_with_the_one_token_that_fits(client):
    answer = client.completions.create(model="tiny", prompt=[5] * 16383, max_tokens=10, temperature=0)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_chat_can_go_on_from_its_own_answer(client):
    first = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, seed=1)
    history = [*CHAT, first.choices[0].message, {"role": "user", "content": "more"}]
    second = client.chat.completions.create(model="tiny", messages=history, max_tokens=8, seed=1)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.choices[0].finish_reason in ("length", "stop")
