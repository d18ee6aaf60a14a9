"""Attention inside each sequence, its mask, and the mean of its rows, against plain formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops import varlen_attention
from tests.support.budget import assert_within_budget

STARTS = torch.tensor([0, 5, 6, 29], dtype=torch.int32)


def inputs(heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = ((29, heads, 16), (29, kv_heads, 16), (29, kv_heads, 24))
    q, k, v = (torch.randn(shape, generator=made).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("causal", "window", "softcap"),
    [(False, 0, 0.0), (True, 0, 0.0), (False, 4, 0.0), (True, 4, 0.0), (False, 0, 2.0), (False, 40, 0.0)],
)
def test_the_kernel_is_the_reference_in_float64(
    dtype: torch.dtype, causal: bool, window: int, softcap: float
):
    q, k, v = inputs(4, 2, dtype)
    rest = (STARTS, 0.3, causal, window, softcap)
    truth = varlen_attention.varlen_attention_reference(q.double(), k.double(), v.double(), *rest)
    plain = varlen_attention.varlen_attention_reference(q, k, v, *rest)
    assert_within_budget(varlen_attention.OP(q, k, v, *rest), truth, plain)


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 3), (True, 3)])
def test_the_reference_is_softmax_over_the_keys_that_a_query_sees(causal: bool, window: int):
    q, k, v = inputs(2, 2, torch.float64)
    found = varlen_attention.varlen_attention_reference(q, k, v, STARTS, 0.5, causal, window, 0.0)
    for first, stop in ((0, 5), (5, 6), (6, 29)):
        for i in range(first, stop):
            seen = [
                j for j in range(first, stop)
                if (not causal or j <= i) and (not window or abs(i - j) < window)
            ]  # fmt: skip
            for head in range(2):
                weights = (k[seen, head] @ q[i, head] * 0.5).softmax(0)
                torch.testing.assert_close(found[i, head], weights @ v[seen, head])


def test_the_operator_is_well_behaved():
    q, k, v = inputs(4, 2, torch.float32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(varlen_attention.OP, (q, k, v, STARTS, 0.3, False, 0, 0.0), test_utils=checks)


def test_wrong_shapes_are_named():
    q, k, v = inputs(4, 2, torch.float32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        varlen_attention.OP(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), STARTS, 0.3, False, 0, 0.0)
    with pytest.raises(ValueError, match="k has shape"):
        varlen_attention.OP(q, k[:5], v, STARTS, 0.3, False, 0, 0.0)
