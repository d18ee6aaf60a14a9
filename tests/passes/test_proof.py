"""The numeric proof accepts what is right and catches what is not."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.errors import CompileError
from ostinato.ops import silu_mul
from ostinato.passes.fuse_silu_mul import FuseSiluMul
from ostinato.passes.match import Spelling, example
from ostinato.passes.proof import extract, in_float64, prove
from tests.support.graphs import trace


def silu_of_sum(a, b):
    return (F.silu((a + b).float()).to(a.dtype),)


def inputs(dtype=torch.bfloat16):
    seed = torch.Generator().manual_seed(1)
    return [torch.randn(5, 16, generator=seed).to(dtype) for _ in range(2)]


def check(fused, *, exact=False, dtype=torch.bfloat16):
    plain = trace(silu_of_sum, *inputs(dtype), tokens_dim={})
    truth = None if exact else in_float64(plain)
    return prove(plain, fused, inputs(dtype), truth=truth, description="test")


def test_the_same_arithmetic_is_exact():
    proof = check(silu_of_sum, exact=True)
    assert (proof.ok, proof.max_error, proof.budget) == (True, 0.0, 0.0)


def test_another_rounding_is_close_but_not_exact():
    def rounds_once(a, b):
        return (F.silu(a.float() + b.float()).to(a.dtype),)

    assert check(rounds_once).ok
    assert not check(rounds_once, exact=True).ok


def test_float64_truth_does_not_round_at_casts():
    plain = trace(silu_of_sum, *inputs(), tokens_dim={})
    a, b = (t.double() for t in inputs())
    assert torch.equal(in_float64(plain)(a, b)[0], F.silu(a + b))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: (F.silu(a + b) * 1.1,),
        lambda a, b: (F.silu(a + b).float(),),
        lambda a, b: (F.silu(a + b)[:1],),
        lambda a, b: (F.silu(a + b) * float("nan"),),
        lambda a, b: (F.silu(a + b), a.add_(1))[:1],
    ],
    ids=["too far", "another type", "another shape", "not a number", "writes an input"],
)
def test_wrong_results_are_caught(wrong):
    assert not check(wrong).ok


def test_extract_copies_only_the_named_nodes():
    graph = trace(lambda x: (x.exp() + 1).neg(), torch.randn(5, 8))
    exp, add, _ = [n for n in graph.graph.nodes if n.op == "call_function"]
    part = extract([add], [exp], [add])
    assert torch.equal(part(torch.zeros(3))[0], torch.ones(3))


class WrongSiluMul(FuseSiluMul):
    """Fuses silu(gate) * up into gate * silu(up)."""

    def spellings(self, anchor):
        def swapped(gate, up):
            return silu_mul.OP(up, gate)

        yield Spelling(
            lambda gate, up: F.silu(gate) * up, swapped, {"gate": example(anchor), "up": example(anchor)}
        )


def test_a_wrong_pass_fails_the_compile_and_is_named_with_its_numbers():
    graph = trace(lambda g, u: F.silu(g) * u, *inputs(), tokens_dim={0: 0, 1: 0})
    with pytest.raises(
        CompileError, match=r"pass silu_mul at node silu .*gate \[5, 16\].*error .* over the budget"
    ):
        WrongSiluMul()(graph)
