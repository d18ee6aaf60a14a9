"""The residual sum joins the norm, and stays available to whoever else reads it (cases B21, B25)."""

import pytest
import torch

from ostinato.ops import rms_norm
from ostinato.passes.fuse_add_rms_norm import FuseAddRMSNorm
from tests.support.graphs import assert_fuses as assert_fuses_norms
from tests.support.graphs import assert_refuses, ops, trace


def norm(x, weight, *, round_first=True):
    return rms_norm.OP(x, weight, 1e-5, 0.0 if round_first else 1.0, round_first)


def make(dtype=torch.float32, weight_type=None):
    def tensors(tokens):
        weight = torch.randn(96).to(weight_type or dtype)
        return [torch.randn(1, tokens, 96).to(dtype), torch.randn(1, tokens, 96).to(dtype), weight]

    return tensors


BOTH = {0: 1, 1: 1}


def assert_fuses(function, make_tensors, want, **options):
    assert_fuses_norms(FuseAddRMSNorm(), function, make_tensors, want, tokens_dim=BOTH, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("round_first", [True, False])
def test_fuses_and_hands_the_sum_to_its_other_users(dtype, round_first):
    def block(x, residual, weight):
        total = x + residual
        return norm(total, weight, round_first=round_first), total, total * 2

    assert_fuses(block, make(dtype), {"add_rms_norm": 1, "getitem": 2, "mul": 1})


def test_fuses_a_float32_weight_with_bf16_activations():
    def block(x, residual, weight):
        total = residual + x
        return norm(total, weight, round_first=False), total

    assert_fuses(block, make(torch.bfloat16, torch.float32), {"add_rms_norm": 1, "getitem": 2})


def test_the_sum_may_be_read_before_the_norm_is_taken():
    def block(x, residual, weight):
        total = x + residual
        early = total.exp()
        return norm(total, weight) + early, total

    assert_fuses(block, make(), {"add_rms_norm": 1, "getitem": 2, "exp": 1, "add": 1})


def test_input_and_residual_may_be_one_tensor():
    def block(x, residual, weight):
        return norm(x + x, weight), residual

    assert_fuses(block, make(), {"add_rms_norm": 1, "getitem": 1})


def test_a_scaled_branch_stays_outside():
    def block(x, residual, weight):
        total = residual + x * 0.22
        return norm(total, weight), total

    assert_fuses(block, make(), {"mul": 1, "add_rms_norm": 1, "getitem": 2})


def test_one_of_two_norms_of_a_sum_takes_it_and_the_other_reads_it():
    def block(x, residual, weight):
        total = x + residual
        return norm(total, weight), norm(total, weight * 2), total

    assert_fuses(block, make(), {"add_rms_norm": 1, "getitem": 2, "mul": 1, "rms_norm": 1})


def test_a_chain_of_layers_passes_the_sum_on():
    def layers(x, residual, weight):
        for _ in range(3):
            residual = residual + x
            x = norm(residual, weight)
        return x, residual

    assert_fuses(layers, make(), {"add_rms_norm": 3, "getitem": 6}, matches=3)


def test_a_norm_of_no_sum_is_none_of_its_business():
    graph = trace(lambda x, w: norm(x * 2, w), torch.randn(5, 96), torch.randn(96))
    report = FuseAddRMSNorm()(graph)
    assert (report.matched, report.refused) == (0, {})
    assert ops(graph) == {"mul": 1, "rms_norm": 1}


def test_a_sum_with_a_row_is_refused():
    tensors = [torch.randn(5, 96), torch.randn(1, 96), torch.randn(96)]
    reason = "the two parts of the sum differ in shape"
    assert_refuses(FuseAddRMSNorm(), lambda x, r, w: norm(x + r, w), tensors, {reason: 1})


def test_a_sum_with_a_weight_of_two_parts_is_refused():
    tensors = [torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)]
    reason = "add takes 2 as alpha, the pattern 1"
    block = lambda x, r, w: norm(torch.add(x, r, alpha=2), w)  # noqa: E731  # a function of one line
    assert_refuses(FuseAddRMSNorm(), block, tensors, {reason: 1}, tokens_dim={0: 0, 1: 0})


def test_a_float32_residual_of_bf16_activations_is_refused():
    tensors = [torch.randn(5, 96).bfloat16(), torch.randn(5, 96), torch.randn(96)]
    reason = "residual is bfloat16, not float32"
    block = lambda x, r, w: norm(x + r, w)  # noqa: E731  # a function of one line
    assert_refuses(FuseAddRMSNorm(), block, tensors, {reason: 1}, tokens_dim={0: 0, 1: 0})


def test_an_input_that_is_made_after_the_sum_was_used_is_refused():
    def block(x, residual, weight):
        total = x + residual
        return norm(total, (total.mean((0, 1)) + weight)), total

    reason = "an input is computed after the result is used"
    assert_refuses(FuseAddRMSNorm(), block, make()(5), {reason: 1}, tokens_dim=BOTH)
