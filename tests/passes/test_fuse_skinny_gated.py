"""Gate, up and their product become one op where they are the halves of one plain linear layer."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.ops import gelu_tanh_mul, silu_mul, skinny_linear
from ostinato.passes.fuse_skinny_gated import FuseSkinnyGated
from tests.support.graphs import assert_fuses, assert_refuses

WIDTH = 24
PRODUCTS = {"silu": silu_mul.OP, "gelu_tanh": gelu_tanh_mul.OP}
HALVES = {
    "slices": lambda y: (y[..., :WIDTH], y[..., WIDTH:]),
    "chunk": lambda y: y.chunk(2, dim=-1),
    "split": lambda y: y.split(WIDTH, dim=-1),
    "split by sizes": lambda y: y.split([WIDTH, WIDTH], dim=2),
}


def plain(x, weight, bias=None, norm_weight=None, residual=None):
    return skinny_linear.OP(x, weight, bias, norm_weight, 1e-5, 0.0, False, residual)


def make(dtype=torch.float32):
    def tensors(tokens):
        return [torch.randn(1, tokens, 16).to(dtype), torch.randn(2 * WIDTH, 16).to(dtype)]

    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", PRODUCTS)
@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
def test_fuses_both_activations_of_any_halves(halves, activation, dtype):
    def function(x, weight):
        return PRODUCTS[activation](*halves(plain(x, weight)))

    graph = assert_fuses(FuseSkinnyGated(), function, make(dtype), {"skinny_gated": 1}, tokens_dim={0: 1})
    (op,) = [node for node in graph.graph.nodes if "skinny_gated" in str(node.target)]
    assert op.args[2:] == (None, 0.0, 0.0, False, activation)


def product(gate, up):
    return silu_mul.OP(gate, up)


def quarters(x, weight):
    y = plain(x, weight)
    return product(y[..., :12], y[..., 12:24])


def used_twice(x, weight):
    y = plain(x, weight)
    return product(y[..., :WIDTH], y[..., WIDTH:]), y


def half_used_twice(x, weight):
    gate, up = plain(x, weight).chunk(2, dim=-1)
    return product(gate, up), up * 2


def swapped(x, weight):
    up, gate = plain(x, weight).chunk(2, dim=-1)
    return product(gate, up)


def two_layers(x, weight):
    return product(plain(x, weight), plain(x, weight * 2))


def two_sources(x, weight):
    return product(plain(x, weight)[..., :WIDTH], plain(x, weight * 2)[..., WIDTH:])


def no_layer(x, weight):
    return product(*F.linear(x, weight).chunk(2, dim=-1))


def of_another_dimension(x, weight):
    return product(*plain(x, weight).view(1, -1, 2, WIDTH).chunk(2, dim=2))


def with_bias(x, weight):
    return product(*plain(x, weight, weight[:, 0]).chunk(2, dim=-1))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (quarters, "gate and up are not the first and the second half"),
        (swapped, "gate and up are not the first and the second half"),
        (used_twice, "the result of the linear layer is used elsewhere too"),
        (half_used_twice, "the result of the linear layer is used elsewhere too"),
        (two_layers, "gate and up are not parts of one result"),
        (two_sources, "gate and up are not parts of one result"),
        (of_another_dimension, "gate and up are not parts of one result"),
        (no_layer, "gate and up come from no linear layer"),
        (with_bias, "the linear layer of gate and up does more than multiply"),
    ],
)
def test_near_misses_are_refused_and_untouched(function, reason):
    assert_refuses(FuseSkinnyGated(), function, make()(5), {reason: 1}, tokens_dim={0: 1})
