"""A norm moves into the ops that read it, past views and selected rows, or stays whole."""

import pytest
import torch

from ostinato.ops import rms_norm, skinny_gated, skinny_linear
from ostinato.passes.fuse_skinny_norm import FuseSkinnyNorm
from tests.support.graphs import assert_fuses as assert_fuses_norms
from tests.support.graphs import assert_refuses


def norm(x, scale, *, round_first=True):
    return rms_norm.OP(x, scale, 1e-5, 0.0 if round_first else 1.0, round_first)


def linear(x, weight, bias=None, residual=None):
    return skinny_linear.OP(x, weight, bias, None, 0.0, 0.0, False, residual)


def gated(x, weight, activation="silu"):
    return skinny_gated.OP(x, weight, None, 0.0, 0.0, False, activation)


def make(dtype=torch.float32, scale_type=None):
    def tensors(tokens):
        shapes = [(1, tokens, 16), (24, 16), (24,), (1, tokens, 24)]
        x, weight, bias, h = (torch.randn(shape).to(dtype) for shape in shapes)
        return [x, torch.randn(16).to(scale_type or dtype), weight, bias, h, torch.tensor([tokens - 1, 0])]

    return tensors


TOKENS = {0: 1, 4: 1}


def assert_fuses(function, make_tensors, want, **options):
    return assert_fuses_norms(FuseSkinnyNorm(), function, make_tensors, want, tokens_dim=TOKENS, **options)


@pytest.mark.parametrize(
    ("dtype", "scale_type"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("round_first", [False, True])
def test_a_norm_moves_into_a_linear_layer_with_all_it_has(round_first, dtype, scale_type):
    def function(x, scale, weight, bias, h, rows):
        return linear(norm(x, scale, round_first=round_first), weight, bias, h)

    graph = assert_fuses(function, make(dtype, scale_type), {"skinny_linear": 1})
    (op,) = [node for node in graph.graph.nodes if "skinny" in str(node.target)]
    assert op.args[4:7] == (1e-5, 0.0 if round_first else 1.0, round_first)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_moves_into_gate_and_up(dtype, activation):
    def function(x, scale, weight, bias, h, rows):
        return gated(norm(x, scale), weight, activation)

    assert_fuses(function, make(dtype), {"skinny_gated": 1})


def test_several_readers_each_take_it():
    def function(x, scale, weight, bias, h, rows):
        normed = norm(x, scale)
        return linear(normed, weight), linear(normed, weight * 2, bias), gated(normed, weight)

    assert_fuses(function, make(), {"mul": 1, "skinny_linear": 2, "skinny_gated": 1})


def test_rows_are_selected_before_the_norm_instead_of_after():
    def function(x, scale, weight, bias, h, rows):
        return linear(norm(x, scale)[:, rows], weight)

    assert_fuses(function, make(), {"index": 1, "skinny_linear": 1})


def test_views_in_between_are_taken_of_its_input():
    def function(x, scale, weight, bias, h, rows):
        flat = norm(x, scale).view(-1, 16)
        return linear(flat, weight), linear(flat[1:].unsqueeze(0), weight * 2)

    graph = assert_fuses(function, make(), None)
    assert not [node for node in graph.graph.nodes if "rms_norm" in str(node.target)]


def test_a_norm_that_no_skinny_op_reads_is_none_of_its_business():
    function = lambda x, s, w, b, h, r: norm(x, s) * 2  # noqa: E731  # a function of one line
    assert_refuses(FuseSkinnyNorm(), function, make()(5), {}, tokens_dim=TOKENS)


def read_twice(x, scale, weight, bias, h, rows):
    normed = norm(x, scale)
    return linear(normed, weight), normed.exp()


def returned(x, scale, weight, bias, h, rows):
    normed = norm(x, scale)
    return linear(normed, weight), normed


def seen_with_other_rows(x, scale, weight, bias, h, rows):
    normed = norm(x, scale)
    return linear(normed, weight), linear(normed.view(-1, 8), weight[:, :8])


def added(x, scale, weight, bias, h, rows):
    normed = norm(x, scale)
    return linear(normed, weight[:16], None, normed)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (read_twice, "the norm is read by exp too"),
        (returned, "the norm is read by output too"),
        (seen_with_other_rows, "the norm is read by view too"),
        (added, "the norm is added, or a weight, not only multiplied"),
    ],
)
def test_near_misses_are_refused_and_untouched(function, reason):
    assert_refuses(FuseSkinnyNorm(), function, make()(5), {reason: 1}, tokens_dim=TOKENS)


def test_an_input_that_is_written_in_between_is_refused():
    def function(x, scale, weight, bias, h, rows):
        normed = norm(x, scale)
        x.mul_(2)
        return linear(normed, weight)

    reason = "the input of the norm is written before the product"
    assert_refuses(FuseSkinnyNorm(), function, make()(5), {reason: 1}, tokens_dim=TOKENS)
