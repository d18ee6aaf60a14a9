"""Who writes, who shares memory (case B21)."""

import torch

from ostinato.passes import pipeline
from ostinato.passes.aliases import Aliases, written
from ostinato.passes.config import PassesConfig
from tests.support.graphs import trace

torch.library.define("ostinato_test::add_one_two_", "(Tensor(a!) a, Tensor(b!) b) -> ()")


@torch.library.impl("ostinato_test::add_one_two_", "CompositeExplicitAutograd")
def _add_one_two(a, b):
    a += 1
    b += 2


def node(graph_module, target, place=0):
    return [n for n in graph_module.graph.nodes if target in str(n.target)][place]


def test_views_belong_to_what_they_show():
    graph = trace(lambda x: x.view(-1).exp().reshape(2, -1)[0] + 1, torch.randn(4, 2))
    aliases = Aliases(graph.graph)
    (x,) = [n for n in graph.graph.nodes if n.op == "placeholder"]
    exp = node(graph, "exp")
    assert aliases.owners(node(graph, "view")) == {x}
    assert aliases.owners(exp) == {exp}
    assert aliases.owners(node(graph, "select")) == {exp}
    assert not aliases.is_written(x)


def test_a_write_to_a_row_is_a_write_to_the_base():
    def rows(base):
        torch.ops.ostinato_test.add_one_two_(base[0], base[1])
        return base[0] + base[1] + 2

    graph = trace(rows, torch.zeros(2, 3), tokens_dim={})
    (base,) = [n for n in graph.graph.nodes if n.op == "placeholder"]
    aliases = Aliases(graph.graph)
    assert [n.name for n in written(aliases.writers[0])] == ["select", "select_1"]
    assert aliases.is_written(base)
    assert aliases.is_written(node(graph, "select", 2))
    assert not aliases.is_written(node(graph, "add.Tensor"))


def test_the_pieces_of_a_chunk_share_its_memory():
    def halves(x):
        left, right = x.exp().chunk(2, dim=-1)
        left.mul_(2)
        return right + left

    graph = trace(halves, torch.randn(3, 4))
    aliases = Aliases(graph.graph)
    assert aliases.owners(node(graph, "getitem", 1)) == {node(graph, "exp")}
    assert aliases.is_written(node(graph, "getitem", 1))  # conservative: pieces of one tensor count as one


def test_writes_to_two_rows_of_one_tensor_survive_every_pass_in_their_order():
    def rows(base):
        torch.ops.ostinato_test.add_one_two_(base[0], base[1])  # nobody uses a result of it
        return base[0] + base[1] + 2

    written_base, out = torch.tensor([[1.0] * 3, [2.0] * 3]), torch.full((3,), 5.0)
    graph = trace(rows, torch.zeros(2, 3), tokens_dim={}, clean=False)
    pipeline.run(graph, PassesConfig(), {})
    for run in (rows, graph, torch.compile(rows, backend="aot_eager", fullgraph=True)):
        for again in range(2):  # new inputs each time, as a replayed graph has
            base = torch.zeros(2, 3) + again
            got = run(base)
            got = got[0] if isinstance(got, tuple | list) else got
            assert torch.equal(base, written_base + again)
            assert torch.equal(got, out + 2 * again)
