"""silu(gate) * up, in every form that it comes in, and in those that only look like it."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.passes.fuse_silu_mul import FuseSiluMul
from tests.support.graphs import assert_fuses, assert_refuses, ops, trace


def two(dtype=torch.float32):
    return lambda tokens: [torch.randn(tokens, 16).to(dtype), torch.randn(tokens, 16).to(dtype)]


BOTH = {0: 0, 1: 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "order", [lambda g, u: F.silu(g) * u, lambda g, u: u * F.silu(g)], ids=["gate", "up"]
)
def test_fuses_in_either_order(order, dtype):
    assert_fuses(FuseSiluMul(), order, two(dtype), {"silu_mul": 1}, tokens_dim=BOTH)


def test_fuses_the_halves_of_one_merged_projection():
    def mlp(x, weight):
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return up * F.silu(gate)

    def make(tokens):
        return [torch.randn(1, tokens, 8), torch.randn(24, 8)]

    left = {"linear": 1, "chunk": 1, "getitem": 2, "silu_mul": 1}
    assert_fuses(FuseSiluMul(), mlp, make, left, tokens_dim={0: 1})


def test_fuses_a_tensor_with_itself():
    assert_fuses(FuseSiluMul(), lambda x: F.silu(x) * x, lambda t: [torch.randn(t, 16)], {"silu_mul": 1})


def test_refuses_a_broadcast_and_says_why():
    tensors = [torch.randn(5, 16).bfloat16(), torch.randn(1, 16).bfloat16()]
    assert_refuses(FuseSiluMul(), lambda g, u: F.silu(g) * u, tensors, {"gate and up differ in shape": 1})


def test_refuses_mixed_types_and_says_why():
    tensors = [torch.randn(5, 16).bfloat16(), torch.randn(5, 16)]
    reason = "up is float32, not bfloat16"
    assert_refuses(FuseSiluMul(), lambda g, u: F.silu(g) * u, tensors, {reason: 1}, tokens_dim=BOTH)


def test_leaves_a_near_miss_as_it_is():
    reason = "silu is used by add, not by mul"
    assert_refuses(FuseSiluMul(), lambda g, u: F.silu(g) + u, two()(5), {reason: 1}, tokens_dim=BOTH)


def test_leaves_an_intermediate_with_a_second_user():
    def shared(gate, up):
        active = F.silu(gate)
        return active * up, active.neg()

    reason = "the intermediate result of silu is used elsewhere too"
    assert_refuses(FuseSiluMul(), shared, two()(5), {reason: 1}, tokens_dim=BOTH)


def test_refuses_when_the_gate_is_written_in_between():
    def write_between(gate, up):
        gate = gate.exp()
        active = F.silu(gate)
        gate.mul_(2)
        return active * up, gate

    reason = "mul_ writes an input in between"
    assert_refuses(FuseSiluMul(), write_between, two()(5), {reason: 1}, tokens_dim=BOTH)


def test_counts_places_and_refusals_apart():
    graph = trace(lambda g, u: (F.silu(g) * u, F.silu(u) * g, F.silu(g) + u), *two()(5), tokens_dim=BOTH)
    report = FuseSiluMul()(graph)
    assert (report.matched, sum(report.refused.values())) == (2, 1)
    assert ops(graph) == {"silu_mul": 2, "silu": 1, "add": 1}
