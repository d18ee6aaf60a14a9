"""Clean-up: what changes nothing goes, what writes stays."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.ops import kv_write
from ostinato.passes.base import Fuel
from ostinato.passes.remove_duplicates import RemoveDuplicates
from ostinato.passes.remove_noops import RemoveNoops
from tests.support.graphs import ops, trace

torch.library.define("ostinato_test::bump_rows_", "(Tensor(a!) a, Tensor(b!) b) -> ()")


@torch.library.impl("ostinato_test::bump_rows_", "CompositeExplicitAutograd")
def _bump_rows(a, b):
    a += 1
    b += 2


NOTHING = {
    "cast": lambda x: x.to(torch.float32) + 1,
    "type_as": lambda x: x.type_as(x) + 1,
    "device": lambda x: x.to(x.device) + 1,
    "layout": lambda x: torch.ops.aten.to.dtype_layout(x, dtype=x.dtype, layout=torch.strided) + 1,
    "dropout": lambda x: F.dropout(x, 0.3, training=False) + 1,
    "slice": lambda x: x[:, :8] + 1,
    "view": lambda x: x.view(-1, 8) + 1,
    "reshape": lambda x: x.reshape(x.shape) + 1,
    "expand": lambda x: x.expand(-1, 8) + 1,
    "detach": lambda x: x.detach() + 1,
    "two transposes": lambda x: x.transpose(0, 1).transpose(-1, -2) + 1,
    "added dimension": lambda x: x[None][0] + x.unsqueeze(-1).select(2, 0) + 1,
    "times one": lambda x: x * 1.0 + 1,
    "empty part": lambda x: torch.cat([x, x[:, 8:]], dim=-1) + 1,
    "nobody's": lambda x: (x.exp(), x + 1)[1],
}


@pytest.mark.parametrize("function", NOTHING.values(), ids=NOTHING)
def test_what_changes_nothing_is_removed(function):
    x = torch.randn(5, 8)
    graph = trace(function, x, clean=False)
    report = RemoveNoops()(graph)
    assert report.matched
    assert set(ops(graph)) <= {"add", "sym_size"}
    for tokens in (5, 1, 9):
        x = torch.randn(tokens, 8)
        assert torch.equal(graph(x)[0], function(x))
    assert RemoveNoops()(graph).matched == 0


SOMETHING = {
    "another type": (lambda x: x.to(torch.bfloat16), "to"),
    "dropout while training": (lambda x: F.dropout(x, 0.3, training=True), "dropout"),
    "part": (lambda x: x[:, :7], "slice"),
    "every second": (lambda x: x[:, ::2], "slice"),
    "another shape": (lambda x: x.view(-1, 2, 4), "view"),
    "one transpose": (lambda x: x.transpose(0, 1), "transpose"),
    "row of an added dimension": (lambda x: x.unsqueeze(1)[0], "select"),
    "row made a table again": (lambda x: x[0].unsqueeze(0), "unsqueeze"),
    "dimension added elsewhere": (lambda x: x.view(1, -1, 8)[0].unsqueeze(1), "unsqueeze"),
    "contiguous of a transpose": (lambda x: x.view(-1, 2, 4).transpose(1, 2).contiguous(), "contiguous"),
    "integer times one point": (lambda x: x.to(torch.int64) * 1.0, "mul"),
    "forced copy": (lambda x: x.to(torch.float32, copy=True), "to"),
    "clone": (lambda x: x.clone(), "clone"),
}


@pytest.mark.parametrize(("function", "op"), SOMETHING.values(), ids=SOMETHING)
def test_what_changes_something_stays(function, op):
    graph = trace(function, torch.randn(5, 8), clean=False)
    RemoveNoops()(graph)
    assert ops(graph)[op] == 1


def test_the_only_row_seen_as_a_table_again_is_that_table():
    graph = trace(lambda x: x.exp()[:, 0].unsqueeze(1) + 1, torch.randn(5, 1, 8))
    assert ops(graph) == {"exp": 1, "add": 1}


def test_casts_are_spelled_one_way():
    def casts(x, y):
        return x.type_as(y), x.to("cpu", torch.bfloat16)

    tensors = torch.randn(5, 8), torch.randn(5).half()
    graph = trace(casts, *tensors, tokens_dim={0: 0, 1: 0}, clean=False)
    RemoveNoops()(graph)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.to.dtype"] * 2
    x = torch.randn(3, 8)
    assert [t.dtype for t in graph(x, torch.randn(3).half())] == [torch.float16, torch.bfloat16]


def test_a_product_with_one_stays_where_its_memory_is_written():
    def bump(x):
        y = x * 1.0
        y.add_(1)
        return x + y

    x = torch.randn(5, 8)
    graph = trace(bump, x)
    assert ops(graph)["mul"] == 1
    assert torch.equal(graph(x.clone())[0], bump(x.clone()))


def test_a_write_without_users_survives():
    def write(k, k_cache, v_cache, slots):
        kv_write.OP(k, k, k_cache, v_cache, slots)
        return k + 1

    k, cache = torch.randn(5, 2, 4), torch.zeros(3, 4, 2, 4)
    graph = trace(write, k, cache, cache.clone(), torch.arange(5), tokens_dim={0: 0, 3: 0})
    RemoveDuplicates()(graph)
    graph(k, cache, torch.zeros_like(cache), torch.arange(5))
    assert ops(graph)["kv_write"] == 1
    assert torch.equal(cache.view(12, 2, 4)[:5], k)


def test_rows_of_one_base_written_in_place_keep_their_results():
    def rows(base):
        torch.ops.ostinato_test.bump_rows_(base[0], base[1])
        first = base[0] + base[1] + 2
        torch.ops.ostinato_test.bump_rows_(base[0], base[1])
        return first, base[0] + base[1] + 2

    graph = trace(rows, torch.zeros(2, 3), tokens_dim={}, clean=False)
    RemoveNoops()(graph)
    RemoveDuplicates()(graph)
    for _ in range(2):
        base = torch.zeros(2, 3)
        first, second = graph(base)
        assert torch.equal(first, torch.full((3,), 5.0))
        assert torch.equal(second, torch.full((3,), 8.0))
        assert torch.equal(base, torch.tensor([[2.0] * 3, [4.0] * 3]))


def test_fuel_stops_the_clean_up_and_zero_leaves_the_graph_as_it_is():
    graph = trace(lambda x: x.detach().detach().detach() + 1, torch.randn(5, 8), clean=False)
    before = graph.code
    assert RemoveNoops()(graph, fuel=Fuel(0)).matched == 0
    assert graph.code == before
    assert RemoveNoops()(graph, fuel=Fuel(1)).matched == 1
