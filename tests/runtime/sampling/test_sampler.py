"""Draws against distributions known by hand, filters, edges, and independence of the batch."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ostinato.errors import InvalidRequest
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.sampling import sampler as sampler_module
from ostinato.runtime.sampling.sampler import Sampler, SampleRow, draw, filtered_probs, validate_sampling
from ostinato.runtime.sampling.sampling_rng import random_bits
from tests.support.sampling_rows import exponential

EIGHTHS = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125])  # exact in float32; token 2 is impossible


def row(name: str = "r", *, seed: int = 1, position: int = 0, **sampling: object) -> SampleRow:
    return SampleRow(name, SamplingParams.model_validate(sampling), seed, position, [], 0)


def one(logits: Tensor, **sampling: object) -> int:
    """The token of a single row."""
    return Sampler(len(logits)).sample(logits[None], [row(**sampling)]).tokens["r"]


def kept(logits: Tensor, **sampling: object) -> list[int]:
    """Ids that survive the filters."""
    x = (logits - logits.max())[None].float()
    return filtered_probs(x, [SamplingParams.model_validate(sampling)])[0].nonzero().squeeze(1).tolist()


def test_the_token_that_arrives_first_is_drawn():
    times = [
        [exponential(5, at, token) / share for token, share in enumerate((1, 2, 3, 4))] for at in range(50)
    ]
    first = [row_times.index(min(row_times)) for row_times in times]
    assert set(first) == {0, 1, 2, 3}
    for shares in ([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]):  # need not sum to one
        assert draw(torch.tensor([shares] * 50), [random_bits(5, at) for at in range(50)]) == first


def test_numbers_of_few_kept_tokens_are_those_of_their_ids():
    probs = torch.rand(60, 1000) * (torch.rand(60, 1000) < 0.1)
    bits = [random_bits(1, at) for at in range(60)]
    tokens = draw(probs, bits)
    assert all(probs[at, token] > 0 for at, token in enumerate(tokens))
    assert draw(probs + 1e-30, bits) == tokens  # all are kept, and the others come too late


def test_logits_that_are_rounded_otherwise_draw_the_same_tokens():
    torch.manual_seed(7)
    logits = torch.randn(200, 50_000)
    rows = [row(f"r{i}", seed=i) for i in range(200)]
    nearly = logits + (torch.rand_like(logits) - 0.5) * 2e-5  # as float32 in a batch of another size
    assert Sampler(50_000).sample(nearly, rows).tokens == Sampler(50_000).sample(logits, rows).tokens


def test_frequencies_follow_the_distribution():
    logits = EIGHTHS.log().expand(4000, 5)
    rows = [row(f"r{i}", seed=i) for i in range(4000)]
    tokens = list(Sampler(5).sample(logits, rows).tokens.values())
    for token, share in enumerate(EIGHTHS.tolist()):
        assert abs(tokens.count(token) - 4000 * share) <= 4 * (4000 * share * (1 - share)) ** 0.5


def test_one_seed_gives_independent_draws_along_its_positions():
    logits = torch.zeros(2000, 2)
    rows = [row(f"r{i}", seed=5, position=i) for i in range(2000)]
    tokens = list(Sampler(2).sample(logits, rows).tokens.values())
    assert abs(sum(tokens) - 1000) < 4 * 500**0.5
    repeats = sum(a == b for a, b in pairwise(tokens))
    assert abs(repeats - 1000) < 4 * 500**0.5


def test_equal_rows_give_equal_tokens_alone_in_any_batch_and_in_any_place():
    torch.manual_seed(0)
    logits = torch.randn(100, 1003) * 4
    settings = [
        {},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"temperature": 0.6, "top_k": 50, "top_p": 0.8, "logprobs": 3},
        {"logit_bias": {5: 4.0}, "temperature": 0.9},
        {"temperature": 0.0, "logit_bias": {7: -100}},
    ]
    rows = [row(f"r{i}", seed=i, position=i % 7, **settings[i % len(settings)]) for i in range(100)]
    together = Sampler(1003).sample(logits, rows)
    order = torch.randperm(100).tolist()
    mixed = Sampler(1003).sample(logits[order], [rows[i] for i in order])
    assert mixed.tokens == together.tokens
    for index in range(100):
        alone = Sampler(1003).sample(logits[index : index + 1].clone(), [rows[index]])
        assert alone.tokens == {f"r{index}": together.tokens[f"r{index}"]}
        assert alone.logprobs.get(f"r{index}") == together.logprobs.get(f"r{index}")


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.zeros(1, 1000)
    for seed, position in ((1, 0), (1, 1), (2, 0)):
        token = Sampler(1000).sample(logits, [row(seed=seed, position=position)]).tokens["r"]
        assert token == min(range(1000), key=lambda t: exponential(seed, position, t))


def test_greedy_takes_the_lowest_of_equal_ids_and_needs_no_distribution(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "softmax", None)
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [9.0, 3.0, 3.0, 9.0]])
    for dtype in (torch.float32, torch.bfloat16):
        batch = Sampler(4).sample(logits.to(dtype), [row("a", temperature=0), row("b", temperature=0)])
        assert batch.tokens == {"a": 1, "b": 0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e-5, 2e-5])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float):
    logits = torch.tensor([-1e30, 3e4, 2.9e4, -torch.inf])
    assert all(one(logits, temperature=temperature, seed=s) == 1 for s in range(20))


def test_temperature_scales_the_logits():
    probs = filtered_probs(torch.tensor([[0.0, -2.0]]), [SamplingParams(temperature=2.0)])[0]
    assert float(probs[1] / probs[0]) == pytest.approx(math.exp(-1), rel=1e-6)


def test_top_k_keeps_exactly_k_and_the_lower_ids_among_equals():
    logits = torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0])
    assert kept(logits, top_k=1) == [3]
    assert kept(logits, top_k=2) == [1, 3]
    assert kept(logits, top_k=3) == [1, 2, 3]
    assert kept(torch.zeros(5), top_k=2) == [0, 1]


@pytest.mark.parametrize("top_k", [0, -1, 5, 6, 10**9])
def test_top_k_off_or_beyond_the_vocabulary_keeps_everything(top_k: int):
    assert kept(torch.arange(5.0), top_k=top_k) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [(0.01, [1]), (0.45, [1]), (0.55, [1, 3]), (0.7, [1, 3]), (0.8, [0, 1, 3]), (0.9, [0, 1, 3, 4])],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, ids: list[int]):
    assert kept(EIGHTHS.log(), top_p=top_p) == ids


def test_top_p_of_one_keeps_every_possible_token():
    assert kept(EIGHTHS.log(), top_p=1.0) == [0, 1, 3, 4]


def test_top_p_is_taken_of_what_top_k_left():
    # of (0.5, 0.25): 0.5 is two thirds
    assert kept(EIGHTHS.log(), top_k=2, top_p=0.6) == [1]
    assert kept(EIGHTHS.log(), top_k=2, top_p=0.7) == [1, 3]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(top_p: float, spread: float):
    torch.manual_seed(1)
    logits = torch.randn(5000) * spread
    probs = torch.softmax(logits - logits.max(), 0)
    values, order = probs.sort(descending=True, stable=True)
    count = int((values.double().cumsum(0) < top_p * probs.double().sum()).sum()) + 1
    assert kept(logits, top_p=top_p) == sorted(order[:count].tolist())


def test_min_p_is_a_share_of_the_likeliest_token():
    assert kept(EIGHTHS.log(), min_p=0.2) == [0, 1, 3, 4]
    assert kept(EIGHTHS.log(), min_p=0.3) == [1, 3]
    assert kept(EIGHTHS.log(), min_p=1.0) == [1]
    assert kept(torch.zeros(3), min_p=1.0) == [0, 1, 2]
    # after temperature: at 2, ratios become square roots, 0.25 -> 0.5 and 0.5 -> 0.707
    assert kept(EIGHTHS.log(), min_p=0.6, temperature=2.0) == [1, 3]


def test_min_p_at_a_high_temperature_allows_only_its_tokens_in_a_thousand_draws():
    logits = torch.tensor([5.0, 4.9, 4.0, 0.0]).expand(1000, 4)
    rows = [row(f"r{i}", seed=i, temperature=2.0, min_p=0.9) for i in range(1000)]
    assert set(Sampler(4).sample(logits, rows).tokens.values()) == {0, 1}


def test_the_strictest_filters_together_leave_one_token():
    for logits in (torch.zeros(7), torch.arange(7.0)):
        assert len(kept(logits, top_k=1, top_p=1e-9, min_p=1.0, temperature=100)) == 1


def test_padding_past_the_vocabulary_is_never_drawn():
    logits = torch.zeros(300, 12)
    logits[:, 10:] = 50.0
    rows = [row(f"r{i}", seed=i, temperature=i % 2) for i in range(300)]
    tokens = Sampler(10).sample(logits, rows).tokens
    assert set(tokens.values()) == set(range(10))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_or_infinity_fails_alone(bad: float, temperature: float):
    logits = torch.zeros(3, 8)
    logits[:, 2] = 40.0
    logits[1, 5] = bad
    rows = [row(n, temperature=temperature, position=4, logprobs=1) for n in "abc"]
    batch = Sampler(8).sample(logits, rows)
    assert batch.tokens == {"a": 2, "c": 2}
    assert batch.errors == {"b": "the model gave NaN or infinite logits for generated token 4"}
    assert set(batch.logprobs) == {"a", "c"}


def test_a_row_without_any_possible_token_fails():
    batch = Sampler(4).sample(torch.full((1, 4), -torch.inf), [row()])
    assert (batch.tokens, list(batch.errors)) == ({}, ["r"])


def test_the_logits_are_not_changed_and_no_rows_are_fine():
    logits = torch.randn(1, 16)
    before = logits.clone()
    Sampler(16).sample(logits, [row(logit_bias={3: 5.0}, top_k=2, repetition_penalty=1.5)])
    assert torch.equal(logits, before)
    assert Sampler(16).sample(torch.empty(0, 16), []).tokens == {}


def test_rows_beyond_one_chunk_are_sampled_alike(monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(10, 50)
    rows = [row(f"r{i}", seed=i, top_p=0.9) for i in range(10)]
    expected = Sampler(50).sample(logits, rows).tokens
    monkeypatch.setattr(sampler_module, "CHUNK_ROWS", 3)
    assert Sampler(50).sample(logits, rows).tokens == expected


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        ({"logit_bias": {32: 1.0}}, "logit_bias", "token id 32 is not in the vocabulary, ids are 0 to 31"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "token id -1"),
        ({"logit_bias": {3: 100.5}}, "logit_bias", "bias 100.5 of token 3 is out of range"),
        ({"logit_bias": {3: math.nan}}, "logit_bias", "bias nan"),
        ({"logit_bias": dict.fromkeys(range(32), -100)}, "logit_bias", "every token is forbidden"),
        ({"stop_token_ids": (5, 99)}, "stop_token_ids", "99 is not in the vocabulary"),
        ({"allowed_token_ids": (5, 32)}, "allowed_token_ids", "32 is not in the vocabulary"),
        ({"allowed_token_ids": (5,), "logit_bias": {6: 100}}, "allowed_token_ids", "leave none of them"),
        ({"allowed_token_ids": (5,), "bad_word_ids": ((5,),)}, "allowed_token_ids", "leave none of them"),
        ({"bad_word_ids": ((5,), ())}, "bad_word_ids", "must be one or more ids from 0 to 31"),
        ({"bad_word_ids": ((5, 32),)}, "bad_word_ids", "must be one or more ids from 0 to 31"),
        ({"bad_words": ("x",)}, "bad_words", "an engine knows no text; give bad_word_ids"),
        ({"logprob_token_ids": (5,)}, "logprob_token_ids", "needs logprobs=0"),
        ({"logprob_token_ids": (5,), "logprobs": 2}, "logprob_token_ids", "got logprobs=2"),
        ({"logprob_token_ids": (-1,), "logprobs": 0}, "logprob_token_ids", "-1 is not in the vocabulary"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens=5 is more than max_tokens=4"),
        ({"logprobs": 33}, "logprobs", "the vocabulary has only 32 tokens"),
        ({"prompt_logprobs": 33}, "prompt_logprobs", "the vocabulary has only 32 tokens"),
    ],
)
def test_parameters_that_this_model_cannot_honour_are_refused(
    sampling: dict[str, object], param: str, message: str
):
    with pytest.raises(InvalidRequest, match=message) as caught:
        validate_sampling(SamplingParams.model_validate(sampling), 32)
    assert caught.value.param == param


def test_parameters_at_the_edges_are_accepted():
    params = SamplingParams(
        logit_bias={0: -100, 31: 100}, stop_token_ids=(31,), min_tokens=4, max_tokens=4, logprobs=32
    )
    validate_sampling(params, 32)
