"""Masks of grammars in the sampling op: only allowed tokens, drawn as if there were no others."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.ops import sample
from ostinato.ops.sample import NONE_ALLOWED, OK, OP, Config
from ostinato.ops.sample_rows import row_fields
from tests.support.op_routes import INTERPRETER, ROUTES
from tests.support.sampling_rows import FILTERS, Staged, assert_drawn_right, settings

VOCAB = 150
SMALL = Config(chunk=64, num_warps=1, edges=8, few=16, most=64)


def mask_of(allowed: list[int], device: str = "cpu") -> Tensor:
    """int32 words, padded to 16 bytes."""
    bits = np.zeros(-(-VOCAB // 128) * 128, np.uint8)
    bits[allowed] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)).to(device)


def sampled(
    route: str, logits: Tensor, staged: Staged, masks: dict[int, Tensor]
) -> tuple[list[int], list[int]]:
    words = staged.rows.cpu().numpy().copy()
    for row, mask in masks.items():
        row_fields(words)["mask"][row] = mask.data_ptr()
    rows = torch.from_numpy(words).to(staged.rows.device)
    logits = logits.to(rows.device)
    if route == INTERPRETER:
        sample.launch(logits, rows, VOCAB, *staged.results, config=SMALL)
    else:
        OP(logits, rows, VOCAB, *staged.results)
    return staged.tokens.tolist(), staged.status.tolist()


@pytest.mark.parametrize("route", ROUTES)
def test_masked_rows_draw_from_allowed_tokens_alone_and_other_rows_are_as_before(route: str) -> None:
    device = "cuda" if route == "cuda" else "cpu"
    allowed = [0, 31, 32, 63, 64, 77, 127, 128, 149]
    rows = [settings(**filters) for filters in FILTERS]
    logits = torch.randn(2 * len(rows), VOCAB) * 2
    logits[:, 5] = 9.0  # the best by far, and not allowed
    staged = Staged(VOCAB, [*rows, *rows], seed=3, device=device)
    masked = range(len(rows))
    tokens, status = sampled(route, logits, staged, {row: mask_of(allowed, device) for row in masked})
    assert status == [OK] * len(tokens)
    plain = Staged(VOCAB, [*rows, *rows], seed=3, device=device)
    assert tokens[len(rows) :] == sampled(route, logits, plain, {})[0][len(rows) :]
    barred = torch.ones(VOCAB, dtype=torch.bool)
    barred[allowed] = False
    for row, params in enumerate(rows):
        left = logits[row].masked_fill(barred, -torch.inf)
        assert tokens[row] in allowed
        if params.temperature == 0:
            assert tokens[row] == int(left.argmax())
        else:
            assert_drawn_right(left, params, 3 + row, 0, tokens[row])


@pytest.mark.parametrize("route", ROUTES)
def test_a_mask_meets_bias_and_penalties_and_may_leave_nothing(route: str) -> None:
    device = "cuda" if route == "cuda" else "cpu"
    greedy = {"temperature": 0.0}
    rows = [
        settings(**greedy, logit_bias={7: 100.0}),
        settings(**greedy, logit_bias={7: -100.0}),
        settings(**greedy, presence_penalty=2.0),
    ]
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3.0, 2.0, 50.0
    masks = {0: mask_of([8], device), 1: mask_of([7, 8], device), 2: mask_of([7, 8], device)}
    tokens, status = sampled(route, logits, Staged(VOCAB, rows, device=device), masks)
    assert (tokens, status) == ([0, 8, 7], [NONE_ALLOWED, OK, OK])
