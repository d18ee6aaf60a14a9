"""The matcher on its own: operand order, dimensions, constants, and what it says when it fails."""

import pytest
import torch

from ostinato.passes.matcher import Found, Miss, find
from ostinato.passes.trace import trace
from tests.support.graphs import trace as trace_graph

aten = torch.ops.aten
SCALE = 0.37


def pattern(x, y, scale):
    return (x * scale + y).exp().sum(dim=-1)


def look(function, *tensors, target=aten.exp.default, **options):
    examples = {"x": torch.empty(2, 3), "y": torch.empty(2, 3), "scale": SCALE}
    graph = trace_graph(function, *tensors, tokens_dim={0: 0, 1: 0}, **options)
    (anchor,) = [n for n in graph.graph.nodes if n.target == target]
    traced = trace(pattern, examples, key=pattern)
    return find(traced, anchor, constants={"scale": SCALE}), traced


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x * 3.0 + y).exp().sum(dim=-1),
        lambda x, y: (y + 3.0 * x).exp().sum(dim=1),
        lambda x, y: (y + x * 3).exp().sum(dim=[-1]),
    ],
)
def test_finds_the_pattern_in_either_order_and_from_either_end(function):
    found, traced = look(function, torch.randn(5, 3), torch.randn(5, 3))
    assert isinstance(found, Found)
    assert found.constants == {"scale": 3.0}
    names = {name: found.nodes[node].name for name, node in traced.inputs.items()}
    assert names == {"x": "tensors_0", "y": "tensors_1"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, y: (x * 3.0 + y).exp().sum(dim=0), "sum takes 0 as dim, the pattern 1"),
        (lambda x, y: (x * 3.0 + y).exp().mean(dim=-1), "exp is used by mean, not by sum"),
        (lambda x, y: (x * 3.0 - y).exp().sum(dim=-1), "sub where the pattern has add"),
        (lambda x, y: (x / 3.0 + y).exp().sum(dim=-1), "div where the pattern has mul"),
        (lambda x, y: (x * y + y).exp().sum(dim=-1), "mul takes a graph input as other, the pattern 0.37"),
        (lambda x, y: (x.bfloat16() * 3.0 + y).exp().sum(dim=-1), "x is bfloat16, not float32"),
    ],
)
def test_says_what_differs_where_it_got_furthest(function, reason):
    miss, _ = look(function, torch.randn(5, 3), torch.randn(5, 3))
    assert isinstance(miss, Miss)
    assert miss.reason == reason


def test_one_constant_must_have_one_value():
    def doubled(x, scale):
        return (x * scale).exp() * scale

    traced = trace(doubled, {"x": torch.empty(2, 3), "scale": SCALE}, key=doubled)
    graph = trace_graph(lambda x: (x * 2.0).exp() * 3.0, torch.randn(5, 3))
    (anchor,) = [n for n in graph.graph.nodes if n.target == aten.exp.default]
    miss = find(traced, anchor, constants={"scale": SCALE})
    assert miss.reason == "scale is 2 in one place and 3 in another"


def test_a_pattern_is_traced_once_for_like_examples():
    examples = {"x": torch.empty(2, 3), "y": torch.empty(2, 3), "scale": SCALE}
    assert trace(pattern, examples, key=pattern) is trace(pattern, dict(examples), key=pattern)
    wide = examples | {"x": torch.empty(2, 3, dtype=torch.float64)}
    assert trace(pattern, wide, key=pattern) is not trace(pattern, examples, key=pattern)
