"""Log-probabilities: values, ranks, alternatives, and numbers that JSON can carry."""

import json
import math

import pytest
import torch

from ostinato.errors import EngineError
from ostinato.runtime.messages import SamplingParams, TokenLogprob
from ostinato.runtime.sampling import logprobs as logprobs_module
from ostinato.runtime.sampling.logprobs import FLOOR, token_logprobs
from ostinato.runtime.sampling.sampler import Sampler, SampleRow

PROBS = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125])


def sampled(**sampling: object) -> TokenLogprob:
    params = SamplingParams.model_validate(sampling)
    return Sampler(5).sample(PROBS.log()[None], [SampleRow("r", params, 1, 0, [1, 1], 2)]).logprobs["r"]


def test_the_chosen_token_its_rank_and_the_best_alternatives():
    record = sampled(temperature=0, logprobs=3)
    assert (record.token_id, record.rank) == (1, 1)
    assert record.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token for token, _ in record.top] == [1, 3, 0]  # 0 and 4 are equal: lower id first
    assert [value for _, value in record.top] == pytest.approx(
        [math.log(p) for p in (0.5, 0.25, 0.125)], abs=1e-6
    )


def test_named_tokens_take_the_place_of_the_best_in_the_order_asked_and_impossible_ones_are_finite():
    record = sampled(temperature=0, logprobs=0, logprob_token_ids=(2, 4, 1))
    assert (record.token_id, record.rank) == (1, 1)
    assert [token for token, _ in record.top] == [2, 4, 1]
    assert [value for _, value in record.top] == pytest.approx(
        [FLOOR, math.log(0.125), math.log(0.5)], abs=1e-6
    )


def test_zero_alternatives_give_the_chosen_token_alone_and_none_gives_nothing():
    assert sampled(temperature=0, logprobs=0).top == ()
    params = SamplingParams(temperature=0)
    assert Sampler(5).sample(PROBS.log()[None], [SampleRow("r", params, 1, 0, [], 0)]).logprobs == {}


def test_the_model_s_own_distribution_is_reported_whatever_changes_the_choice():
    plain = sampled(temperature=0, logprobs=2)
    for change in ({"top_k": 1, "temperature": 3.0}, {"temperature": 0.0, "repetition_penalty": 1.5}):
        assert sampled(logprobs=2, **change).top == plain.top
    forced = sampled(temperature=0, logprobs=1, logit_bias={4: 100})
    assert (forced.token_id, forced.rank) == (4, 3)
    assert forced.logprob == pytest.approx(math.log(0.125), abs=1e-6)


def test_every_value_is_finite_and_strict_json_takes_it():
    logits = PROBS.log()[None]  # holds -inf
    (all_of_them,) = token_logprobs(logits, [1], [5])
    assert [token for token, _ in all_of_them.top] == [1, 3, 0, 4]  # the impossible token is left out
    (impossible,) = token_logprobs(logits, [2], [1])
    assert (impossible.logprob, impossible.rank) == (FLOOR, 5)
    for record in (all_of_them, impossible):
        json.dumps(record.model_dump(), allow_nan=False)


def test_prompt_rows_are_scored_in_chunks_as_in_one(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    logits, ids = torch.randn(11, 40), torch.randint(40, (11,)).tolist()
    whole = token_logprobs(logits, ids, [2] * 11)
    expected = torch.log_softmax(logits.double(), -1)
    for row, record in enumerate(whole):
        assert record.token_id == ids[row]
        assert record.logprob == pytest.approx(float(expected[row, ids[row]]), abs=1e-5)
        assert record.rank == 1 + int((expected[row] > expected[row, ids[row]]).sum())
        assert [token for token, _ in record.top] == expected[row].topk(2).indices.tolist()
    monkeypatch.setattr(logprobs_module, "CHUNK_ROWS", 4)
    assert token_logprobs(logits, ids, [2] * 11) == whole
    assert token_logprobs(logits[:0], [], []) == []


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    assert token_logprobs(logits, [7], [0])[0].logprob == pytest.approx(-math.log(1000), abs=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_or_infinite_logits_raise(bad: float):
    logits = torch.zeros(2, 4)
    logits[1, 1] = bad
    with pytest.raises(EngineError, match="NaN or infinite logits"):
        token_logprobs(logits, [0, 0], [0, 0])
