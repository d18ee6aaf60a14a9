"""Bias, barred tokens and penalties, with numbers worked out by hand."""

import pytest
import torch

from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.sampling.penalties import LogitAdjuster
from ostinato.runtime.sampling.sampler import NONE_ALLOWED, Sampler, SampleRow

LOGITS = [2.0, -1.0, 0.5, 4.0, 0.0, 1.0]


def adjusted(
    tokens: list[int], prompt_tokens: int, *, eos: frozenset[int] = frozenset(), **sampling: object
) -> list[float]:
    params = SamplingParams.model_validate(sampling)
    adjuster = LogitAdjuster(params, tokens, prompt_tokens, eos_token_ids=eos, vocab_size=6)
    logits = torch.tensor(LOGITS)
    adjuster.adjust(logits, len(tokens) - prompt_tokens)
    return logits.tolist()


def test_repetition_divides_positive_and_multiplies_other_logits_of_prompt_and_answer():
    assert adjusted([0, 1, 3], 2, repetition_penalty=2.0) == [1.0, -2.0, 0.5, 2.0, 0.0, 1.0]


def test_frequency_counts_the_answer_only():
    assert adjusted([0, 3, 3, 1], 1, frequency_penalty=0.5) == [2.0, -1.5, 0.5, 3.0, 0.0, 1.0]


def test_presence_is_once_per_token_of_the_answer():
    assert adjusted([0, 3, 3, 1], 1, presence_penalty=0.75) == [2.0, -1.75, 0.5, 3.25, 0.0, 1.0]


def test_penalties_add_up_after_repetition():
    # token 3: 4 / 2 - 2 * 0.5 - 0.25; token 0 only in the prompt: 2 / 2
    assert adjusted([0, 3, 3], 1, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25) == [
        1.0,
        -1.0,
        0.5,
        0.75,
        0.0,
        1.0,
    ]


def test_negative_penalties_encourage():
    assert adjusted([5, 4], 1, presence_penalty=-1.0)[4] == 1.0


def test_counts_grow_with_the_answer_token_by_token():
    tokens = [0]
    adjuster = LogitAdjuster(
        SamplingParams(frequency_penalty=1.0), tokens, 1, eos_token_ids=frozenset(), vocab_size=6
    )
    seen = []
    for token in (3, 3, 5, 3):
        logits = torch.tensor(LOGITS)
        adjuster.adjust(logits, len(tokens) - 1)
        seen.append((logits[3].item(), logits[5].item()))
        tokens.append(token)
    assert seen == [(4.0, 1.0), (3.0, 1.0), (2.0, 1.0), (2.0, 0.0)]


def test_more_distinct_tokens_than_the_first_arrays_hold_are_counted():
    tokens = [token for token in range(300) for _ in range(2)]
    adjuster = LogitAdjuster(
        SamplingParams(frequency_penalty=1.0), tokens, 0, eos_token_ids=frozenset(), vocab_size=400
    )
    logits = torch.zeros(400)
    adjuster.adjust(logits, len(tokens))
    assert logits.tolist() == [-2.0] * 300 + [0.0] * 100


def test_bias_is_added_and_minus_100_forbids():
    assert adjusted([], 0, logit_bias={0: 1.5, 3: -100, 4: -99}) == [3.5, -1.0, 0.5, -torch.inf, -99.0, 1.0]


def test_plus_100_leaves_only_its_tokens():
    none = -torch.inf
    assert adjusted([], 0, logit_bias={1: 100, 2: 100, 3: 99}) == [none, 99.0, 100.5, none, none, none]


def test_eos_and_stop_tokens_are_barred_for_min_tokens_even_if_forced():
    bar = -torch.inf
    barred = {"min_tokens": 2, "stop_token_ids": (3,)}
    assert adjusted([5, 5], 1, eos=frozenset({0}), **barred) == [bar, -1.0, 0.5, bar, 0.0, 1.0]
    assert adjusted([5, 5, 5], 1, eos=frozenset({0}), **barred) == LOGITS
    assert adjusted([5, 5], 1, eos=frozenset({0}), logit_bias={0: 100}, **barred) == [
        bar,
        -1.0,
        0.5,
        bar,
        0.0,
        1.0,
    ]


BAR = -torch.inf


def test_allowed_tokens_are_the_only_ones_and_a_bias_cannot_widen_them():
    assert adjusted([], 0, allowed_token_ids=(3, 1, 3)) == [BAR, -1.0, BAR, 4.0, BAR, BAR]
    assert (
        adjusted([], 0, allowed_token_ids=(1, 3), logit_bias={0: 100, 3: 100})
        == [BAR] * 3 + [104.0] + [BAR] * 2
    )


@pytest.mark.parametrize(
    ("answer", "barred"),
    [([], [5]), ([2], [3, 5]), ([2, 3], [5]), ([1, 2], [3, 4, 5]), ([2, 1, 2], [3, 4, 5]), ([1], [5])],
)
def test_the_last_token_of_a_bad_word_is_barred_where_the_answer_ends_with_its_beginning(answer, barred):
    words = ((5,), (2, 3), (1, 2, 4))
    expected = [BAR if token in barred else value for token, value in enumerate(LOGITS)]
    assert adjusted([1, 2, *answer], 2, bad_word_ids=words) == expected  # the prompt begins no word
    assert adjusted([*answer], 0, bad_word_ids=words, logit_bias=dict.fromkeys(barred, 50)) == expected


def test_a_forced_token_that_completes_a_bad_word_leaves_nothing():
    params = SamplingParams(bad_word_ids=((0, 1),), logit_bias={1: 100})
    batch = Sampler(3).sample(torch.zeros(1, 3), [SampleRow("r", params, 0, 1, [0], 0)])
    assert batch.errors == {"r": NONE_ALLOWED}


@pytest.mark.parametrize(
    ("sampling", "position", "idle"),
    [
        ({}, 0, True),
        ({"repetition_penalty": 1.1}, 0, False),
        ({"presence_penalty": -0.1}, 0, False),
        ({"frequency_penalty": 0.1}, 0, False),
        ({"logit_bias": {1: 1.0}}, 0, False),
        ({"allowed_token_ids": (1,)}, 9, False),
        ({"bad_word_ids": ((1,),)}, 0, False),
        ({"bad_word_ids": ((1, 2),)}, 9, False),
        ({"min_tokens": 3}, 2, False),
        ({"min_tokens": 3}, 3, True),
    ],
)
def test_an_adjuster_knows_when_it_has_nothing_to_do(sampling: dict[str, object], position: int, idle: bool):
    params = SamplingParams.model_validate(sampling)
    adjuster = LogitAdjuster(params, [], 0, eos_token_ids=frozenset({0}), vocab_size=6)
    assert adjuster.is_idle(position) is idle


def generate(sampler: Sampler, name: str, logits: torch.Tensor, count: int, **sampling: object) -> list[int]:
    """Tokens of a model whose logits never change."""
    params, tokens = SamplingParams.model_validate(sampling), [4]
    for position in range(count):
        row = SampleRow(name, params, 3, position, tokens, 1)
        tokens.append(sampler.sample(logits[None], [row]).tokens[name])
    return tokens[1:]


def test_a_forbidden_token_never_appears_and_a_forced_one_always():
    logits = torch.tensor([0.0, 9.0, 1.0, 0.5])
    sampler = Sampler(4)
    for temperature in (0.0, 1.5):
        assert 1 not in generate(
            sampler, f"a{temperature}", logits, 200, logit_bias={1: -100}, temperature=temperature
        )
        forced = generate(
            sampler, f"b{temperature}", logits, 50, logit_bias={2: 100}, temperature=temperature
        )
        assert forced == [2] * 50


def test_a_greedy_answer_under_a_frequency_penalty_follows_the_arithmetic():
    # 3.0, 2.5 and 0: each use costs 1; equal logits go to the lower id
    logits = torch.tensor([3.0, 2.5, 0.0])
    assert generate(Sampler(3), "r", logits, 6, temperature=0, frequency_penalty=1.0) == [0, 1, 0, 1, 0, 1]


def test_min_tokens_puts_eos_off():
    logits = torch.tensor([9.0, 1.0, 0.0])
    tokens = generate(Sampler(3, frozenset({0})), "r", logits, 4, temperature=0, min_tokens=3)
    assert tokens == [1, 1, 1, 0]


def test_what_forbids_every_token_is_an_error_of_that_request():
    params = SamplingParams(min_tokens=1, stop_token_ids=(0,), logit_bias={1: -100})
    batch = Sampler(2).sample(torch.zeros(1, 2), [SampleRow("r", params, 0, 0, [], 0)])
    assert batch.errors == {"r": NONE_ALLOWED}


def test_released_requests_leave_no_state_and_a_reused_id_starts_anew():
    sampler = Sampler(3)
    logits = torch.tensor([3.0, 2.5, 0.0])
    first = generate(sampler, "r", logits, 4, temperature=0, presence_penalty=2.0)
    assert generate(sampler, "r", logits, 4, temperature=0, presence_penalty=2.0) == first
    assert sampler.num_requests == 1
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    for tokens in ([0, 1], [0, 0]):  # one params object for both
        row = SampleRow("r", params, 0, 1, tokens, 1)
        assert sampler.sample(logits[None], [row]).tokens == {"r": 0 if tokens[1] else 1}
    sampler.release("r")
    sampler.release("r")
    assert sampler.num_requests == 0
