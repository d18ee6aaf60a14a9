"""A token that is settled is drawn by both samplers whatever the request says, and counts like any other."""

import numpy as np
import torch

from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.sampling.device_sampler import DeviceSampler
from ostinato.runtime.sampling.sampler import NONE_ALLOWED, Sampler, SampleRow, bad_logits
from ostinato.runtime.token_limits import Limit, mask_without
from tests.support.sampling_rows import StagedRow, settings, stage_rows

VOCAB, EOS, FORCED = 140, 1, 77
AGAINST = {
    "greedy": {"temperature": 0.0},
    "bias": {"logit_bias": {FORCED: -100.0}},
    "another": {"logit_bias": {5: 100.0}},
    "allowed": {"allowed_token_ids": (3, 4)},
    "bad": {"bad_word_ids": ((FORCED,), (5, FORCED))},
    "early": {"min_tokens": 5, "stop_token_ids": (FORCED,)},
    "cut": {"top_k": 1, "top_p": 0.1, "min_p": 0.9},
    "penalties": {"repetition_penalty": 50.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
}


def drawn_by_device(
    params: list[SamplingParams], limits: list[Limit | None], logits: torch.Tensor, steps: int = 1
) -> list[list[int]]:
    count = len(params)
    device = DeviceSampler(VOCAB, frozenset({EOS}), count, torch.device("cpu"))
    slots = [device.open(f"r{at}", one, at, ()) for at, one in enumerate(params)]
    last = torch.zeros(count, dtype=torch.int64)
    rows = []
    for step in range(steps):
        words = np.zeros(device.staged_words(count), np.int64)
        staged = [StagedRow(at, slot, step) for at, slot in enumerate(slots)]
        stage_rows(device, words, staged)
        places = [at for at, limit in enumerate(limits) if limit is not None]
        if places and step == 0:
            device.allow(words, places, [limit for limit in limits if limit is not None])
        chosen = device.choose(count, range(count), slots)
        device.bar_words(chosen, [step] * count, last)
        tokens, status = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int32)
        device.launch(logits, torch.from_numpy(words), tokens, status, last)
        assert status.tolist() == [0] * count
        rows.append(tokens.tolist())
    return rows


def drawn_by_cpu(
    params: list[SamplingParams], limits: list[Limit | None], logits: torch.Tensor, steps: int = 1
) -> list[list[int]]:
    sampler, answers = Sampler(VOCAB, frozenset({EOS})), [list[int]() for _ in params]
    rows = []
    for step in range(steps):
        asked = [
            SampleRow(f"r{at}", one, at, step, answers[at], 0, limits[at] if step == 0 else None)
            for at, one in enumerate(params)
        ]
        batch = sampler.sample(logits, asked)
        assert batch.errors == {}
        rows.append([batch.tokens[f"r{at}"] for at in range(len(params))])
        for answer, token in zip(answers, rows[-1], strict=True):
            answer.append(token)
    return rows


def test_both_samplers_draw_the_settled_token_and_then_go_on_alike():
    params = [settings(**{"temperature": 1.0, **one}) for one in AGAINST.values()]  # type: ignore[arg-type]
    limits: list[Limit | None] = [FORCED] * len(params)
    logits = torch.randn(len(params), VOCAB) * 3
    logits[:, FORCED] = -60.0
    by_cpu = drawn_by_cpu(params, limits, logits, 3)
    assert by_cpu[0] == [FORCED] * len(params)
    assert drawn_by_device(params, limits, logits, 3) == by_cpu


def test_masks_settled_tokens_and_free_rows_go_in_one_step():
    params = [settings(temperature=0.0)] * 4
    limits: list[Limit | None] = [FORCED, None, mask_without([9], VOCAB), 3]
    logits = torch.zeros(4, VOCAB)
    logits[:, 9] = 2.0
    logits[:, 8] = 1.0
    assert drawn_by_cpu(params, limits, logits) == [[FORCED, 9, 8, 3]]
    assert drawn_by_device(params, limits, logits) == [[FORCED, 9, 8, 3]]


def test_a_settled_token_of_a_broken_row_is_the_end_of_its_request_too():
    row = SampleRow("r", settings(), 0, 4, [], 0, FORCED)
    batch = Sampler(VOCAB).sample(torch.full((1, VOCAB), torch.nan), [row])
    assert (batch.tokens, batch.errors) == ({}, {"r": bad_logits(4)})


def test_a_mask_of_nothing_is_said_to_be_one():
    row = SampleRow("r", settings(), 0, 0, [], 0, mask_without(range(VOCAB), VOCAB))
    assert Sampler(VOCAB).sample(torch.zeros(1, VOCAB), [row]).errors == {"r": NONE_ALLOWED}
