"""Patterns become the same nodes as a model's own code, once for alike examples."""

import torch

from ostinato.passes.trace import trace
from tests.support.graphs import trace as trace_graph

X, Y = torch.empty(2, 8), torch.empty(2, 8)  # export takes one tensor given twice for one input


def scaled(x, y, scale):
    return (x.float() * scale + y).to(x.dtype), y.sum(dim=-1)


def targets(nodes):
    return [str(node.target) for node in nodes if node.op == "call_function"]


def test_inputs_have_the_names_of_the_arguments_and_outputs_their_order():
    traced = trace(scaled, {"x": X, "y": Y, "scale": 0.37}, key="names")
    assert list(traced.inputs) == ["x", "y"]  # a number is a constant, no input
    assert [node.target for node in traced.nodes] == [node.target for node in traced.graph.nodes][2:-1]
    product = next(node for node in traced.nodes if node.target == torch.ops.aten.mul.Tensor)
    assert product.args == (traced.inputs["x"], 0.37)
    assert [str(node.target) for node in traced.outputs] == ["aten.add.Tensor", "aten.sum.dim_IntList"]


def test_a_pattern_has_the_nodes_of_the_code_that_it_stands_for_in_every_type():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(2, 8, dtype=dtype)
        pattern = trace(scaled, {"x": x, "y": Y, "scale": 0.37}, key="types")
        model = trace_graph(lambda x, y: scaled(x, y, 2.0), x, Y, tokens_dim={0: 0, 1: 0})
        assert targets(pattern.nodes) == targets(model.graph.nodes)
        assert (
            len(pattern.nodes) == {torch.float32: 3, torch.bfloat16: 5}[dtype]
        )  # casts of float32 are no-ops


def test_alike_examples_are_traced_once_and_others_again():
    first = trace(scaled, {"x": X, "y": Y, "scale": 0.37}, key="once")
    assert trace(scaled, {"x": torch.ones(2, 8), "y": Y, "scale": 0.37}, key="once") is first
    for other in (
        {"x": torch.empty(3, 8), "y": torch.empty(3, 8), "scale": 0.37},
        {"x": X.bfloat16(), "y": Y, "scale": 0.37},
        {"x": X, "y": Y, "scale": 0.5},
    ):
        assert trace(scaled, other, key="once") is not first
    assert trace(scaled, {"x": X, "y": Y, "scale": 0.37}, key="another") is not first
