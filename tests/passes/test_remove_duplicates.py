"""Equal nodes become one, except where that would change what is read or drawn."""

import torch

from ostinato.passes.base import Fuel
from ostinato.passes.remove_duplicates import RemoveDuplicates
from tests.support.graphs import ops, trace


def test_equal_calls_become_one_and_random_numbers_do_not():
    graph = trace(lambda x: (x.exp() + x.exp(), torch.rand_like(x) - torch.rand_like(x)), torch.randn(5, 8))
    report = RemoveDuplicates()(graph)
    assert (report.matched, ops(graph)["exp"], ops(graph)["rand_like"]) == (1, 1, 2)
    x = torch.randn(4, 8)
    twice, drawn = graph(x)
    assert torch.equal(twice, x.exp() + x.exp())
    assert drawn.abs().max() > 0
    assert RemoveDuplicates()(graph).matched == 0


def test_chains_of_equal_calls_become_one_chain():
    graph = trace(lambda x: x.exp()[:, :4].neg() + x.exp()[:, :4].neg(), torch.randn(5, 8))
    assert RemoveDuplicates()(graph).matched == 3
    assert ops(graph) == {"exp": 1, "slice": 1, "neg": 1, "add": 1}


def test_numbers_of_unlike_type_are_not_equal():
    graph = trace(lambda x: x.to(torch.int64).add(1) + x.to(torch.int64).add(1.0), torch.randn(5, 8))
    assert RemoveDuplicates()(graph).matched == 1
    assert ops(graph) == {"to": 1, "add": 3}


def test_two_reads_around_a_write_stay_two():
    def read_write_read(x):
        y = x.exp()
        before = y.sum()
        y.add_(1)
        return before, y.sum()

    graph = trace(read_write_read, torch.randn(5, 8))
    assert RemoveDuplicates()(graph).matched == 0
    before, after = graph(torch.zeros(2, 8))
    assert (before.item(), after.item()) == (16.0, 32.0)


def test_fuel_limits_the_removals():
    graph = trace(lambda x: x.exp() + x.exp() + x.exp(), torch.randn(5, 8))
    before = graph.code
    assert RemoveDuplicates()(graph, fuel=Fuel(0)).matched == 0
    assert graph.code == before
    assert RemoveDuplicates()(graph, fuel=Fuel(1)).matched == 1
    assert ops(graph)["exp"] == 2
