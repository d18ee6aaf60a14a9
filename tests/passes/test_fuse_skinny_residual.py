"""The residual joins the linear layer that ends a branch; whoever else reads sum or norm still gets it."""

import pytest
import torch

from ostinato.ops import add_rms_norm, skinny_linear
from ostinato.passes.fuse_skinny_residual import FuseSkinnyResidual
from tests.support.graphs import assert_fuses as assert_fuses_sums
from tests.support.graphs import assert_refuses


def linear(x, weight, residual=None):
    return skinny_linear.OP(x, weight, None, None, 0.0, 0.0, False, residual)


def make(dtype=torch.float32):
    def tensors(tokens):
        shapes = [(1, tokens, 16), (1, tokens, 24), (24, 16), (24,)]
        return [torch.randn(shape).to(dtype) for shape in shapes]

    return tensors


TOKENS = {0: 1, 1: 1}


def assert_fuses(function, make_tensors, want, **options):
    assert_fuses_sums(FuseSkinnyResidual(), function, make_tensors, want, tokens_dim=TOKENS, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("comes_first", [False, True])
def test_a_sum_fuses_in_either_order(comes_first, dtype):
    def function(x, h, weight, scale):
        branch = linear(x, weight)
        return branch + h if comes_first else h + branch

    assert_fuses(function, make(dtype), {"skinny_linear": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("comes_first", [False, True])
def test_add_rms_norm_leaves_a_norm_and_hands_on_the_sum(comes_first, round_first, dtype):
    def function(x, h, weight, scale):
        pair = (linear(x, weight), h) if comes_first else (h, linear(x, weight))
        normed, total = add_rms_norm.OP(*pair, scale, 1e-5, 0.5, round_first)
        return normed, total, total * 2

    assert_fuses(function, make(dtype), {"skinny_linear": 1, "rms_norm": 1, "mul": 1})


def test_a_bias_and_a_view_in_between_are_kept():
    def function(x, h, weight, scale):
        rows = skinny_linear.OP(x[0], weight, scale, None, 0.0, 0.0, False, None)
        return h + rows.view(1, -1, 24)

    assert_fuses(function, make(), {"select": 1, "unsqueeze": 1, "skinny_linear": 1})


def test_of_two_layers_the_later_one_takes_the_other_as_residual():
    def function(x, h, weight, scale):
        first = linear(x, weight)
        return first + linear(x * 2, weight)

    assert_fuses(function, make(), {"mul": 1, "skinny_linear": 2})


def test_a_chain_of_branches_passes_the_sum_on():
    def function(x, h, weight, scale):
        for _ in range(3):
            h = h + linear(x, weight)
            x = h[..., :16]
        return h

    assert_fuses(function, make(), {"skinny_linear": 3, "slice": 2}, matches=3)


def test_a_sum_of_other_things_is_none_of_its_business():
    assert_refuses(FuseSkinnyResidual(), lambda x, h, w, s: h + x[..., :1], make()(5), {}, tokens_dim=TOKENS)
    scaled = lambda x, h, w, s: h + linear(x, w) * 0.6  # noqa: E731  # a function of one line
    assert_refuses(FuseSkinnyResidual(), scaled, make()(5), {}, tokens_dim=TOKENS)


def used_twice(x, h, weight, scale):
    branch = linear(x, weight)
    return h + branch, branch


def taken_twice(x, h, weight, scale):
    return torch.add(h, linear(x, weight), alpha=2)


def a_number(x, h, weight, scale):
    return linear(x, weight) + 1


def a_row(x, h, weight, scale):
    return linear(x, weight) + scale


def a_wide_residual(x, h, weight, scale):
    return h.double() + linear(x, weight)


def a_second_residual(x, h, weight, scale):
    return linear(x, weight, h) + h


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (used_twice, "the result of the linear layer is used elsewhere too"),
        (taken_twice, "the sum is not of two tensors taken once"),
        (a_number, "the sum is not of two tensors taken once"),
        (a_row, "the two parts of the sum differ in type or shape"),
        (a_wide_residual, "the two parts of the sum differ in type or shape"),
        (a_second_residual, "a residual is added already"),
    ],
)
def test_near_misses_are_refused_and_untouched(function, reason):
    assert_refuses(FuseSkinnyResidual(), function, make()(5), {reason: 1}, tokens_dim=TOKENS)


def test_an_input_that_is_written_before_the_sum_is_refused():
    def function(x, h, weight, scale):
        branch = linear(x, weight)
        x.mul_(2)
        return h + branch

    reason = "an input of the linear layer is written before the sum"
    assert_refuses(FuseSkinnyResidual(), function, make()(5), {reason: 1}, tokens_dim=TOKENS)
