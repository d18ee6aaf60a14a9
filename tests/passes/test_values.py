"""Values of nodes: compared for all sizes at once, computed without guards, mended where strides change."""

import torch

from ostinato.passes import values as values_module
from ostinato.passes.values import (
    Values,
    argument,
    concrete_shape,
    copy_origin,
    same_layout,
    same_shape,
    same_size,
    tensor,
)
from tests.support.graphs import trace

aten = torch.ops.aten


def node_of(graph_module, target):
    (node,) = [node for node in graph_module.graph.nodes if node.target == target]
    return node


def test_sizes_are_equal_only_if_they_are_for_every_number_of_tokens():
    graph = trace(lambda x, y: (x.exp(), x[1:].log(), y.sin()), torch.randn(7, 3), torch.randn(7, 3))
    rows, fewer, seven = (
        tensor(node_of(graph, op.default)).shape[0] for op in (aten.exp, aten.log, aten.sin)
    )
    assert same_size(rows, rows)
    assert same_size(rows - 1, fewer)
    assert not same_size(rows, fewer)
    assert not same_size(rows, seven)  # 7 in the example is chance
    assert same_size(3, 3)
    assert not same_shape(torch.empty(2, 3), torch.empty(2, 3, 1))


def test_layouts_differ_by_type_shape_or_strides_also_within_tuples():
    x = torch.empty(4, 6)
    assert same_layout(x, torch.ones(4, 6))
    assert not same_layout(x, x.double())
    assert not same_layout(x, torch.empty(6, 4).T)
    assert not same_layout(x, torch.empty(4, 5))
    assert same_layout((x, x), [x, x])
    assert not same_layout((x, x), (x, x.T))
    assert not same_layout((x,), (x, x))


def test_symbols_become_the_same_odd_numbers_in_all_shapes_of_a_match():
    graph = trace(lambda x: (x.exp(), torch.cat([x, x]).log()), torch.randn(7, 3))
    sizes: dict = {}
    assert concrete_shape(tensor(node_of(graph, aten.exp.default)), sizes) == (5, 3)
    assert concrete_shape(tensor(node_of(graph, aten.log.default)), sizes) == (10, 3)
    assert list(sizes.values()) == [5]


def test_a_missing_argument_has_its_default():
    graph = trace(lambda x: x.softmax(-1), torch.randn(7, 3))
    node = node_of(graph, aten.softmax.int)
    assert argument(node, 1) == -1
    assert argument(node, 7, "default") == "default"


def test_equal_calls_are_computed_once_and_new_calls_know_where_they_come_from(monkeypatch):
    graph_module = trace(lambda x, y: x.exp() + y.exp(), torch.randn(7, 3), torch.randn(7, 3),
                         tokens_dim={0: 0, 1: 0})  # fmt: skip
    calls = []
    real = values_module._call
    monkeypatch.setattr(values_module, "_call", lambda *call: calls.append(call[0]) or real(*call))
    values, total = Values(), node_of(graph_module, aten.add.Tensor)
    total.meta["stack_trace"] = "model.py, line 7"
    with graph_module.graph.inserting_before(total):
        new = [values.add_call(graph_module.graph, aten.log.default, (x,), like=total) for x in total.args]
    assert calls == [aten.log.default]
    assert [same_layout(node.meta["val"], total.meta["val"]) for node in new] == [True, True]
    assert [node.meta["stack_trace"] for node in new] == ["model.py, line 7"] * 2


def test_the_origin_is_copied_and_nothing_else():
    graph_module = trace(lambda x: x.exp().log(), torch.randn(7, 3))
    source, node = node_of(graph_module, aten.exp.default), node_of(graph_module, aten.log.default)
    source.meta |= {"stack_trace": "here", "mine": 1}
    before = node.meta["val"]
    copy_origin(source, node)
    assert (node.meta["stack_trace"], node.meta["val"] is before, "mine" in node.meta) == (
        "here",
        True,
        False,
    )


def test_a_view_that_new_strides_do_not_allow_becomes_a_reshape():
    graph_module = trace(lambda x: x.clone().view(-1, 6).exp(), torch.randn(7, 2, 3))
    copy, view = node_of(graph_module, aten.clone.default), node_of(graph_module, aten.view.default)
    source = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
    with graph_module.graph.inserting_before(copy):
        turned = Values().add_call(graph_module.graph, aten.transpose.int, (source, 1, 2), like=copy)
    copy.args = (turned,)
    copy.kwargs = {"memory_format": torch.preserve_format}
    Values().refresh([copy])
    assert view.target == aten.reshape.default
    graph_module.recompile()
    x = torch.randn(4, 2, 3)
    assert torch.equal(graph_module(x)[0], x.transpose(1, 2).reshape(-1, 6).exp())
