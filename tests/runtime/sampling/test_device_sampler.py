"""The device sampler against the CPU sampler: whole answers, log-probabilities, slots and memory."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops.sample_rows import row_fields
from ostinato.runtime.messages import SamplingParams, TokenLogprob
from ostinato.runtime.sampling.device_sampler import DeviceSampler, ScoredRow, sampling_error
from ostinato.runtime.sampling.logprobs import token_logprobs
from ostinato.runtime.sampling.sampler import Sampler, SampleRow
from ostinato.runtime.sampling.sampling_rng import bits_at, random_bits, seed_bits, vector_bits
from tests.support.sampling_rows import StagedRow, settings, stage_rows

VOCAB, EOS = 40, frozenset({3})
PROMPT = (5, 9, 5, 44)  # 44 has an embedding and no logit
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ADJUSTED: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 1.3, "temperature": 0.8},
    {"frequency_penalty": 0.5, "presence_penalty": 0.25, "temperature": 0},
    {"presence_penalty": -1.0, "repetition_penalty": 0.8, "top_p": 0.9},
    {"logit_bias": {1: 5.0, 2: -100, 7: -2.5}, "top_k": 8},
    {"logit_bias": {1: 100, 3: 100}, "min_tokens": 2},
    {"logit_bias": {3: 100}, "min_tokens": 2, "stop_token_ids": (6, 41)},
    {"min_tokens": 3, "temperature": 0, "frequency_penalty": 1.0},
    {"allowed_token_ids": (8, 2, 30, 8, 41)},
    {"allowed_token_ids": tuple(range(20)), "logit_bias": {1: 100, 2: 100, 25: 100}, "min_tokens": 3},
    {"allowed_token_ids": (4, 6, 9), "bad_word_ids": ((6,), (9, 4), (4, 4, 4)), "temperature": 1.5},
    {"allowed_token_ids": (1, 2, 3), "bad_word_ids": ((1, 2), (3, 2), (2, 1)), "min_tokens": 4},
    {"bad_word_ids": ((7,), (11, 5)), "repetition_penalty": 1.3, "logit_bias": {5: 9.0, 11: 9.0, 7: 50.0}},
    {},
)


class Steps:
    """A device sampler with outputs, used as a runner does."""

    def __init__(self, max_requests: int, device: str = "cpu", vocab: int = VOCAB) -> None:
        self.device = torch.device(device)
        self.sampler = DeviceSampler(vocab, EOS, max_requests, self.device)
        self.last_tokens = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(0)

    def step(self, logits: Tensor, names: Sequence[str | None], positions: Sequence[int]) -> list[int]:
        """Tokens of the rows, -1 - status where there is none."""
        words = np.empty(self.sampler.staged_words(len(names)), np.int64)
        rows = [
            StagedRow(at, self.sampler._slots[name], position)
            for at, (name, position) in enumerate(zip(names, positions, strict=True))
            if name is not None
        ]
        stage_rows(self.sampler, words, rows)
        chosen = self.sampler.choose(len(names), [row.place for row in rows], [row.slot for row in rows])
        self.sampler.bar_words(chosen, [row.position for row in rows], self.last_tokens)
        self.tokens = torch.empty(len(names), dtype=torch.int64, device=self.device)
        status = torch.empty(len(names), dtype=torch.int32, device=self.device)
        self.sampler.launch(
            logits.to(self.device),
            torch.from_numpy(words).to(self.device),
            self.tokens,
            status,
            self.last_tokens,
        )
        return [t if s == 0 else -1 - s for t, s in zip(self.tokens.tolist(), status.tolist(), strict=True)]


@pytest.mark.parametrize("device", DEVICES)
def test_whole_answers_equal_those_of_the_cpu_sampler(device: str) -> None:
    ours, theirs = Steps(len(ADJUSTED), device), Sampler(VOCAB, EOS)
    params = [settings(**sampling) for sampling in ADJUSTED]
    names = [f"r{at}" for at in range(len(params))]
    answers = [list(PROMPT) for _ in params]
    for at, name in enumerate(names):
        assert ours.sampler.open(name, params[at], 70 + at, PROMPT) == at
    for position in range(12):
        logits = torch.randn(len(params), VOCAB + 4) * 2
        rows = [
            SampleRow(name, params[at], 70 + at, position, answers[at], len(PROMPT))
            for at, name in enumerate(names)
        ]
        expected = list(theirs.sample(logits, rows).tokens.values())
        assert ours.step(logits, names, [position] * len(names)) == expected
        assert ours.last_tokens.tolist() == expected
        for answer, token in zip(answers, expected, strict=True):
            answer.append(token)


def test_a_reused_slot_starts_anew_and_memory_is_held_only_by_those_who_need_it() -> None:
    steps = Steps(1)
    logits = torch.tensor([[3.0, 2.5, 0.0] + [-9.0] * 37])
    params = settings(temperature=0, presence_penalty=2.0)
    answers = []
    for name in ("a", "b"):
        assert steps.sampler.open(name, params, 0, ()) == 0
        assert steps.sampler.state_bytes == 4 * VOCAB
        answers.append([steps.step(logits, [name], [position])[0] for position in range(3)])
        steps.sampler.close(name)
        assert (steps.sampler.num_requests, steps.sampler.state_bytes) == (0, 0)
    assert answers == [[0, 1, 0], [0, 1, 0]]
    steps.sampler.close("b")
    steps.sampler.open("plain", settings(min_tokens=5), 0, PROMPT)
    assert steps.sampler.state_bytes == 4 * VOCAB  # EOS is barred
    steps.sampler.close("plain")
    steps.sampler.open("plain", settings(top_p=0.5, min_p=0.1, seed=1), 0, PROMPT)
    assert steps.sampler.state_bytes == 0


def test_rows_that_are_not_named_sample_nothing_and_failures_have_the_cpu_sampler_s_words() -> None:
    steps = Steps(3)
    forbidden = settings(min_tokens=1, logit_bias=dict.fromkeys(range(VOCAB), -100.0))
    for name, params in (("a", settings()), ("b", forbidden), ("c", settings(frequency_penalty=1.0))):
        steps.sampler.open(name, params, 1, PROMPT)
    logits = torch.randn(4, VOCAB)
    logits[1:3] = torch.nan
    assert steps.step(logits, ["b", None, "c", "a"], [0, 0, 4, 0])[:3] == [-3, 0, -2]
    assert sampling_error(0, 4) is None
    rows = [
        SampleRow("b", forbidden, 1, 0, PROMPT, len(PROMPT)),
        SampleRow("c", settings(), 1, 4, PROMPT, len(PROMPT)),
    ]
    errors = Sampler(VOCAB, EOS).sample(logits[[0, 2]], rows).errors
    assert errors == {"b": sampling_error(2, 0), "c": sampling_error(1, 4)}


def test_staged_numbers_are_those_of_seed_and_position() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 12345], np.array([0, 7, 100_000, 3])
    bits = vector_bits(np.array([seed_bits(seed) for seed in seeds], np.uint64), positions).tolist()
    for seed, position, made in zip(seeds, positions.tolist(), bits, strict=True):
        assert made == random_bits(seed, position)
    sampler = DeviceSampler(VOCAB, EOS, 2, torch.device("cpu"))
    slot = sampler.open("r", settings(top_k=VOCAB + 1, top_p=0.25), 9, ())
    words = np.full(sampler.staged_words(3), -1, np.int64)
    stage_rows(sampler, words, [StagedRow(1, slot, 6)])
    fields = row_fields(words)
    assert fields["random_bits"].view(np.uint64).tolist() == [0, random_bits(9, 6), 0]
    assert fields["kind"].tolist() == [0, 2, 0]
    assert fields["top_k"].tolist() == [0, 0, 0]  # as many as there are: off
    assert fields["top_p"].tolist() == [0, 2**62, 0]


def record_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    return token_logprobs(logits[None, :VOCAB], [token], [num_top])[0]


def assert_close(ours: TokenLogprob | None, theirs: TokenLogprob) -> None:
    assert ours is not None
    assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
    assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    values = [ours.logprob, *(value for _, value in ours.top)]
    assert values == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], abs=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_of_sampled_and_prompt_tokens_equal_the_cpu_records(device: str) -> None:
    steps = Steps(2, device)
    logits = torch.randn(4, VOCAB + 4) * 2
    logits[1, :30] = -torch.inf
    logits[3, 5] = torch.nan
    steps.sampler.open("r", settings(logit_bias={2: 100}), 5, PROMPT)
    (*_, token) = steps.step(logits[:3], [None, None, "r"], [0, 0, 0])
    assert token == 2
    asked = [ScoredRow(2, None, 3), ScoredRow(0, 9, 0), ScoredRow(1, 4, 20), ScoredRow(3, 1, 2)]
    tokens = torch.cat([steps.tokens, steps.tokens[:1]])
    scores = steps.sampler.after(logits.to(device), tokens, asked)
    assert scores is not None
    sampled, plain, impossible, bad = scores.result()
    assert_close(sampled, record_of(logits[2], 2, 3))
    assert_close(plain, record_of(logits[0], 9, 0))
    assert_close(impossible, record_of(logits[1], 4, 20))
    assert impossible is not None
    assert len(impossible.top) == 10
    assert bad is None
    assert steps.sampler.after(logits, tokens, []) is None


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_of_tokens_that_were_named_are_in_their_order(device: str) -> None:
    steps = Steps(1, device)
    logits = torch.randn(2, VOCAB + 4)
    logits[0, 7] = -torch.inf
    steps.sampler.open("r", settings(), 5, PROMPT)
    token = steps.step(logits, ["r", None], [0, 0])[0]
    asked = [
        ScoredRow(0, None, 0, (9, 7, 2)),
        ScoredRow(1, 3, 2),
        ScoredRow(1, None, 0, (1,)),
        ScoredRow(0, 4, 1),
    ]
    scores = steps.sampler.after(logits.to(device), torch.tensor([token, 6], device=device), asked)
    assert scores is not None
    records = scores.result()
    named = token_logprobs(logits[:1, :VOCAB], [token], [0], [(9, 7, 2)])[0]
    assert named.top[1] == (7, -9999.0)
    assert_close(records[0], named)
    assert_close(records[1], record_of(logits[1], 3, 2))
    assert_close(records[2], token_logprobs(logits[1:, :VOCAB], [6], [0], [(1,)])[0])
    assert_close(records[3], record_of(logits[0], 4, 1))
    logits[0, 0] = torch.nan
    scores = steps.sampler.after(logits.to(device), torch.tensor([token, 6], device=device), asked)
    assert scores is not None
    assert [record is None for record in scores.result()] == [True, False, False, True]


def test_a_step_that_is_staged_twice_counts_its_token_once_and_a_reused_slot_has_no_history() -> None:
    steps = Steps(1)
    logits = torch.tensor([[5.0, 4.0, 3.0] + [-9.0] * 37])
    params = settings(temperature=0, bad_word_ids=((0, 0), (0, 1, 0)))
    for name in ("a", "b"):
        slot = steps.sampler.open(name, params, 0, (0, 0))
        tokens = []
        for position in range(5):
            chosen = steps.sampler.choose(1, [0], [slot])
            steps.sampler.bar_words(chosen, [position], steps.last_tokens)
            tokens += steps.step(logits, [name], [position])
        assert tokens == [0, 1, 1, 0, 1]  # the prompt's zeros do not count
        steps.sampler.close(name)
    assert steps.sampler.choose(1, [0], [0]).worded == ()


def test_a_request_is_opened_once_and_only_while_a_slot_is_free() -> None:
    sampler = DeviceSampler(VOCAB, EOS, 1, torch.device("cpu"))
    sampler.open("r", SamplingParams(), 0, PROMPT)
    with pytest.raises(EngineError, match="request 'r' is open already"):
        sampler.open("r", SamplingParams(), 0, PROMPT)
    with pytest.raises(EngineError, match="all 1 slots are taken"):
        sampler.open("s", SamplingParams(), 0, PROMPT)


@pytest.mark.parametrize("size", [1, 4, 11, 30])
def test_rows_that_are_chosen_once_are_staged_as_if_they_were_new(size: int) -> None:
    draw = np.random.default_rng(size)
    sampler = DeviceSampler(VOCAB, EOS, size, torch.device("cpu"))
    slots = [
        sampler.open(f"r{at}", settings(**ADJUSTED[at % len(ADJUSTED)]), 50 + at, PROMPT)
        for at in draw.permutation(size).tolist()
    ]
    gap = [0, *range(2, size + 1)]
    for places in (list(range(size)), gap, draw.permutation(size + 3)[:size].tolist()):
        chosen = sampler.choose(size + 3, places, slots)
        for _ in range(4):
            positions = draw.integers(0, 5, size).tolist()
            words, again = (np.full(sampler.staged_words(size + 3), -1, np.int64) for _ in range(2))
            stage_rows(
                sampler, words, [StagedRow(*row) for row in zip(places, slots, positions, strict=True)]
            )
            sampler.stage(again, chosen, positions)
            assert again.tolist() == words.tolist()
            biases = row_fields(words)["bias"]
            for place, slot, position in zip(places, slots, positions, strict=True):
                early = position < sampler._min_tokens[slot]
                wanted = sampler._early_bias[slot] if early else sampler._fields["bias"][slot]
                assert biases[place] == wanted
                assert row_fields(words)["random_bits"][place] == bits_at(int(sampler._seeds[slot]), position)
