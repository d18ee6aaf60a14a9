"""Every linear layer over the rows of a step becomes the op of the decode plan; others say why they stay."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.passes.base import Fuel
from ostinato.passes.lower_skinny_linear import LowerSkinnyLinear
from tests.support.graphs import name_weights, ops, trace


def traced(function, *tensors, weights=(1,), tokens_dim=None):
    graph = trace(function, *tensors, tokens_dim=tokens_dim)
    name_weights(graph, *weights)
    return graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_is_lowered_and_computes_the_same(has_bias, dtype):
    weight, bias = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype)

    def function(x, weight, bias):
        return F.linear(x, weight, bias if has_bias else None).relu()

    x = torch.randn(1, 7, 16).to(dtype)
    graph = traced(function, x, weight, bias, weights=(1, 2), tokens_dim={0: 1})
    before = graph.code
    assert LowerSkinnyLinear()(graph, fuel=Fuel(0)).matched == 0
    assert graph.code == before
    report = LowerSkinnyLinear()(graph)
    assert (report.matched, report.refused, len(report.proofs)) == (1, {}, 1)
    assert ops(graph) == {"skinny_linear": 1, "relu": 1}
    assert LowerSkinnyLinear()(graph).matched == 0
    for tokens in (7, 1, 20):
        x = torch.randn(1, tokens, 16).to(dtype)
        assert torch.equal(graph(x, weight, bias)[0], function(x, weight, bias))


def test_layers_of_one_kind_are_proved_once():
    def two(x, first, second):
        return F.linear(F.linear(x, first), second)

    graph = traced(two, torch.randn(5, 16), torch.randn(16, 16), torch.randn(16, 16), weights=(1, 2))
    report = LowerSkinnyLinear()(graph)
    assert (report.matched, len(report.proofs)) == (2, 1)


def linear(x, weight):
    return F.linear(x, weight)


@pytest.mark.parametrize(
    ("function", "tensors", "weights", "reason"),
    [
        (
            lambda x, weight: F.linear(x, weight * 2),
            [torch.randn(5, 16), torch.randn(24, 16)],
            (1,),
            "the weight is computed in the graph",
        ),
        (linear, [torch.randn(5, 16), torch.randn(24, 16)], (), "the weight is computed in the graph"),
        (
            linear,
            [torch.randn(5, 16).double(), torch.randn(24, 16).double()],
            (1,),
            "the weight is float64",
        ),
        (
            linear,
            [torch.randn(5, 4, 16), torch.randn(24, 16)],
            (1,),
            "the input is neither [tokens, width] nor [1, tokens, width]",
        ),
    ],
    ids=["computed", "no weight", "float64", "heads"],
)
def test_near_misses_are_refused_and_untouched(function, tensors, weights, reason):
    graph = traced(function, *tensors, weights=weights)
    before = graph.code
    report = LowerSkinnyLinear()(graph)
    assert (report.matched, report.refused) == (0, {reason: 1})
    assert graph.code == before
