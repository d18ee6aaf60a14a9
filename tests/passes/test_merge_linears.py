"""Parallel linear layers become one; the new weight is an expression over the old ones."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.ops.weight_expr import evaluate
from ostinato.passes.base import Fuel
from ostinato.passes.merge_linears import MergeLinears
from ostinato.passes.remove_noops import RemoveNoops
from tests.support.budget import assert_within_budget
from tests.support.graphs import name_weights, ops, trace

K = 16


def three(x, wq, wk, wv):
    return F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)


def with_biases(x, wq, wk, wv, bq, bk, bv):
    return F.linear(x, wq, bq), F.linear(x, wk, bk), F.linear(x, wv, bv)


def heads(x, wq, wk, wv):
    q, k, v = (F.linear(x, w).view(1, x.shape[1], -1, 4).transpose(1, 2) for w in (wq, wk, wv))
    return q.neg(), k.neg(), v.contiguous()


def weights(*rows, dtype=torch.float32, width=K):
    return [torch.randn(n, width).to(dtype) for n in rows]


def traced(function, *tensors):
    graph = trace(function, *tensors, tokens_dim={0: 1})
    name_weights(graph, *range(1, len(tensors)))
    return graph


def run(graph, x, values):
    """Run with weights made from the graph's own expressions."""
    by_name = {f"tensors_{i}": v for i, v in enumerate(values, start=1)}
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    made = [evaluate(n.meta["weight"], by_name.__getitem__) for n in placeholders if "weight" in n.meta]
    return graph(x, *made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [three, heads, with_biases])
def test_merges_and_computes_the_same_for_any_number_of_tokens(function, dtype):
    values = weights(24, 8, 8, dtype=dtype)
    if function is with_biases:
        values += [torch.randn(n).to(dtype) for n in (24, 8, 8)]
    graph = traced(function, torch.randn(1, 5, K).to(dtype), *values)
    report = MergeLinears()(graph)
    assert (report.matched, report.refused) == (1, {})
    assert [proof.ok for proof in report.proofs] == [True]
    assert (ops(graph)["linear"], ops(graph)["slice"]) == (1, 3)
    assert MergeLinears()(graph).matched == 0
    for tokens in (5, 1, 9):
        x = torch.randn(1, tokens, K).to(dtype)
        truth = function(x.double(), *(v.double() for v in values))
        for got, want, true in zip(run(graph, x, values), function(x, *values), truth, strict=True):
            assert_within_budget(got, true, want)


def test_the_weight_is_a_concatenation_in_order():
    graph = traced(three, torch.randn(1, 5, K), *weights(24, 8, 4))
    MergeLinears()(graph)
    (merged,) = [n for n in graph.graph.nodes if "weight" in n.meta]
    assert merged.meta["weight"] == ["concat", 0, [["load", f"tensors_{i}"] for i in (1, 2, 3)]]
    assert tuple(merged.meta["val"].shape) == (36, K)


def test_a_view_that_needed_a_whole_row_becomes_a_reshape():
    def flattened(x, wa, wb):
        return F.linear(x, wa).view(-1), F.linear(x, wb)

    values = weights(8, 8)
    graph = traced(flattened, torch.randn(1, 5, K), *values)
    MergeLinears()(graph)
    assert (ops(graph)["view"], ops(graph)["reshape"]) == (0, 1)
    x = torch.randn(1, 6, K)
    torch.testing.assert_close(run(graph, x, values)[0], flattened(x, *values)[0])


def test_values_of_what_follows_have_the_new_strides():
    graph = traced(heads, torch.randn(1, 5, K), *weights(24, 8, 8))
    MergeLinears()(graph)
    view = next(n for n in graph.graph.nodes if n.target == torch.ops.aten.view.default)
    assert view.meta["val"].stride()[1:] == (40, 4, 1)
    assert ops(graph)["contiguous"] == 1, "a copy that is needed now may not be dropped"
    RemoveNoops()(graph)
    assert ops(graph)["contiguous"] == 1


def one_bias(x, wq, wk, wv, bq):
    return F.linear(x, wq, bq), F.linear(x, wk), F.linear(x, wv)


def tied(x, wq, wk, wv):
    return F.linear(x, wq), F.linear(x, wk), F.linear(x, wv), wk.sum()


def twice(x, wq, wk, wv):
    return F.linear(x, wq), F.linear(x, wk), F.linear(x, wk), wv


def made_bias(x, wq, wk, b):
    return F.linear(x, wq, b.exp()), F.linear(x, wk, b.exp())


MIXED = "some of the parallel layers have a bias and some have none"


@pytest.mark.parametrize(
    ("function", "values", "reason"),
    [
        (one_bias, [*weights(8, 8, 8), torch.randn(8)], MIXED),
        (tied, weights(8, 8, 8), "a weight is used elsewhere too"),
        (twice, weights(8, 8, 8), "a weight is used elsewhere too"),
        (made_bias, [*weights(8, 8), torch.randn(8)], "a bias is computed in the graph"),
    ],
)  # fmt: skip
def test_layers_that_cannot_share_a_weight_are_refused(function, values, reason):
    graph = traced(function, torch.randn(1, 5, K), *values)
    before = graph.code
    report = MergeLinears()(graph)
    assert (report.matched, report.refused) == (0, {reason: 1})
    assert graph.code == before


def test_layers_over_different_inputs_or_with_computed_weights_are_left_alone():
    def apart(x, wq, wk, wv):
        return F.linear(x, wq), F.linear(x + 1, wk), F.linear(x, wv * 2)

    graph = traced(apart, torch.randn(1, 5, K), *weights(8, 8, 8))
    before = graph.code
    assert MergeLinears()(graph)[1:3] == (0, {})
    assert graph.code == before


def test_fuel_counts_groups():
    def two_groups(x, a, b, c, d):
        y = F.linear(x, a) + F.linear(x, b)
        return F.linear(y, c) + F.linear(y, d)

    graph = traced(two_groups, torch.randn(1, 5, K), *weights(K, K, 8, 8))
    assert MergeLinears()(graph, fuel=Fuel(1)).matched == 1
    assert ops(graph)["linear"] == 3
