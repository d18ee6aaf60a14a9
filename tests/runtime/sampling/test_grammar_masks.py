"""A grammar's mask in both samplers: the same tokens on the CPU and by way of the device's buffers."""

import numpy as np
import pytest
import torch

from ostinato.ops.sample_rows import row_fields
from ostinato.runtime.grammar.grammar_state import Mask, mask_words
from ostinato.runtime.sampling.device_masks import DeviceMasks
from ostinato.runtime.sampling.device_sampler import DeviceSampler
from ostinato.runtime.sampling.sampler import NONE_ALLOWED, Sampler, SampleRow
from tests.support.sampling_rows import FILTERS, StagedRow, settings, stage_rows

VOCAB = 140


def mask_of(allowed: list[int]) -> Mask:
    bits = np.zeros(32 * mask_words(VOCAB), np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_cpu_and_device_draw_the_same_allowed_tokens():
    params = [settings(**{"logprobs": 2, **filters}) for filters in FILTERS]
    logits = torch.randn(len(params), VOCAB) * 3
    masks = [mask_of([at, 40 + at, 139]) if at % 2 else None for at in range(len(params))]
    rows = [
        SampleRow(f"r{at}", p, at, 0, [], 0, mask)
        for at, (p, mask) in enumerate(zip(params, masks, strict=True))
    ]
    batch = Sampler(VOCAB).sample(logits, rows)
    device = DeviceSampler(VOCAB, frozenset(), len(params), torch.device("cpu"))
    staged = [StagedRow(at, device.open(f"r{at}", p, at, ()), 0) for at, p in enumerate(params)]
    words = np.zeros(device.staged_words(len(params)), np.int64)
    stage_rows(device, words, staged)
    places = [at for at, mask in enumerate(masks) if mask is not None]
    device.allow(words, places, [mask for mask in masks if mask is not None])
    tokens, status = torch.zeros(len(params), dtype=torch.int64), torch.zeros(len(params), dtype=torch.int32)
    device.launch(
        logits, torch.from_numpy(words), tokens, status, torch.zeros(len(params), dtype=torch.int64)
    )
    assert tokens.tolist() == list(batch.tokens.values())
    for at in places:
        assert batch.tokens[f"r{at}"] in (at, 40 + at, 139)
    # log-probabilities are the model's own: the likeliest token is named although the grammar forbids it
    first = logits[1].log_softmax(-1)
    record = batch.logprobs["r1"]
    assert record.logprob == pytest.approx(float(first[record.token_id]), abs=1e-5)
    assert record.top[0][0] == int(first.argmax())


def test_a_mask_that_leaves_nothing_ends_its_own_request():
    params = settings(temperature=0.0, logit_bias={3: -100.0})
    rows = [
        SampleRow("lost", params, 0, 0, [], 0, mask_of([3])),
        SampleRow("fine", params, 0, 0, [], 0, mask_of([3, 4])),
    ]
    batch = Sampler(VOCAB).sample(torch.zeros(2, VOCAB), rows)
    assert (batch.tokens, batch.errors) == ({"fine": 4}, {"lost": NONE_ALLOWED})


def test_masks_of_three_steps_do_not_share_host_memory_and_rows_without_one_have_no_address():
    sampler = DeviceSampler(VOCAB, frozenset(), 4, torch.device("cpu"), max_rows=2)
    slots = [sampler.open(name, settings(), 0, ()) for name in "ab"]
    words = np.zeros(sampler.staged_words(3), np.int64)
    stage_rows(sampler, words, [StagedRow(0, slots[0], 0), StagedRow(2, slots[1], 0)])
    assert row_fields(words)["mask"].tolist() == [0, 0, 0]
    sampler.allow(words, [2], [mask_of([1])])
    addresses = row_fields(words)["mask"].tolist()
    assert addresses[:2] == [0, 0]
    assert addresses[2] % 16 == 0 < addresses[2]

    masks = DeviceMasks(VOCAB, 2, torch.device("cpu"))
    (first,) = masks.send([mask_of([1])])
    assert masks.send([mask_of([2]), mask_of([3])]) == [first, first + 4 * mask_words(VOCAB)]
    masks.send([mask_of([4])])
    pinned = {tuple(t[0].tolist()) for t in masks._pinned}
    assert pinned == {tuple(mask_of([token]).tolist()) for token in (1, 2, 4)}
