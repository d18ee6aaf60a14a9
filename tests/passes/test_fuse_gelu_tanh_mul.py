"""gelu_tanh(gate) * up; the exact GELU is another function."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.passes.fuse_gelu_tanh_mul import FuseGeluTanhMul
from tests.support.graphs import assert_fuses, assert_refuses

BOTH = {0: 0, 1: 0}


def gelu_mul(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def mul_gelu(gate, up):
    return up * F.gelu(gate, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [gelu_mul, mul_gelu])
def test_fuses_in_either_order(function, dtype):
    def make(tokens):
        return [torch.randn(tokens, 16).to(dtype), torch.randn(tokens, 16).to(dtype)]

    assert_fuses(FuseGeluTanhMul(), function, make, {"gelu_tanh_mul": 1}, tokens_dim=BOTH)


def test_the_exact_gelu_is_refused_by_its_argument():
    tensors = [torch.randn(5, 16), torch.randn(5, 16)]
    reason = "gelu takes none as approximate, the pattern tanh"
    assert_refuses(FuseGeluTanhMul(), lambda g, u: F.gelu(g) * u, tensors, {reason: 1}, tokens_dim=BOTH)


def test_refuses_a_broadcast_and_says_why():
    tensors = [torch.randn(5, 16), torch.randn(5, 1)]
    assert_refuses(FuseGeluTanhMul(), gelu_mul, tensors, {"gate and up differ in shape": 1}, tokens_dim=BOTH)


def test_an_ungated_mlp_is_refused_and_untouched():
    tensors = [torch.randn(5, 16), torch.randn(16, 16)]
    reason = "gelu is used by linear, not by mul"
    mlp = lambda x, w: F.linear(F.gelu(x, approximate="tanh"), w)  # noqa: E731  # a function of one line
    assert_refuses(FuseGeluTanhMul(), mlp, tensors, {reason: 1})
