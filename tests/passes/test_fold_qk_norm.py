"""Norms of single heads move into rope_kv_write; a norm over all heads, or of one side only, stays."""

import pytest
import torch

from ostinato.ops import rms_norm, rope_kv_write
from ostinato.passes.fold_qk_norm import FoldQKNorm
from tests.support.attention_graphs import BLOCK, D, E, G, H
from tests.support.graphs import assert_fuses, assert_refuses

TOKENS = {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 7: 0}


def make(dtype=torch.float32, *, width=1):
    """q, k [1, T, heads, D], v [T, G, E], cos, sin [T, D], planes, slots, norm weights of `width` heads."""

    def tensors(tokens):
        angles = torch.randn(tokens, D // 2).repeat(1, 2)
        return [
            torch.randn(1, tokens, H, D).to(dtype),
            torch.randn(1, tokens, G, D).to(dtype),
            torch.randn(tokens, G, E).to(dtype),
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            torch.zeros(4, BLOCK, G, D, dtype=dtype),
            torch.zeros(4, BLOCK, G, E, dtype=dtype),
            torch.arange(tokens),
            torch.randn(D * (width if width == 1 else H)).to(dtype),
            torch.randn(D * (width if width == 1 else G)).to(dtype),
        ]

    return tensors


def write(q, k, v, cos, sin, k_cache, v_cache, slots, interleaved=False):
    return rope_kv_write.OP(
        q, k, v, cos, sin, k_cache, v_cache, slots, None, None, 0.0, 0.0, False, interleaved
    )


def norm(x, weight, eps=1e-6, offset=0.0, round_first=True):
    return rms_norm.OP(x, weight, eps, offset, round_first)


def tokens_first(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    return write(norm(q, q_weight)[0], norm(k, k_weight)[0], v, cos, sin, k_cache, v_cache, slots)


def heads_first(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    q = norm(q.transpose(1, 2), q_weight, 1e-5, 1.0, False).transpose(1, 2)[0]
    k = norm(k.transpose(1, 2), k_weight, 1e-5, 1.0, False).transpose(1, 2)[0]
    return write(q, k, v, cos, sin, k_cache, v_cache, slots)


def neighbours(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    return write(norm(q, q_weight)[0], norm(k, k_weight)[0], v, cos, sin, k_cache, v_cache, slots, True)


CASES = {
    "qwen3": (tokens_first, {"select": 2}, (1e-6, 0.0, True, False)),
    "gemma3": (heads_first, {"select": 2, "transpose": 4}, (1e-5, 1.0, False, False)),
    "interleaved": (neighbours, {"select": 2}, (1e-6, 0.0, True, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_folds_both_norms_with_the_numbers_of_the_graph(case, dtype):
    function, views, numbers = CASES[case]
    left = {**views, "rope_kv_write": 1}
    graph = assert_fuses(FoldQKNorm(), function, make(dtype), left, tokens_dim=TOKENS)
    (node,) = [n for n in graph.graph.nodes if "rope_kv_write" in str(n.target)]
    assert [a.name for a in node.args[8:10]] == ["tensors_8", "tensors_9"]
    assert node.args[10:] == numbers


def test_no_norm_is_no_refusal():
    def plain(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
        return write(q[0], k[0], v, cos, sin, k_cache, v_cache, slots)

    assert_refuses(FoldQKNorm(), plain, make()(5), {}, tokens_dim=TOKENS)


def one_sided(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    return write(norm(q, q_weight)[0], k[0], v, cos, sin, k_cache, v_cache, slots)


def two_eps(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    return write(norm(q, q_weight, 1e-5)[0], norm(k, k_weight, 1e-6)[0], v, cos, sin, k_cache, v_cache, slots)


def two_roundings(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    q, k = norm(q, q_weight)[0], norm(k, k_weight, round_first=False)[0]
    return write(q, k, v, cos, sin, k_cache, v_cache, slots)


def second_user(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
    q = norm(q, q_weight)
    return write(q[0], norm(k, k_weight)[0], v, cos, sin, k_cache, v_cache, slots), q.exp()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (one_sided, "only one of q and k has a norm"),
        (two_eps, "eps is 1e-05 in one place and 1e-06 in another"),
        (two_roundings, "the norms of q and k round in different places"),
        (second_user, "the intermediate result of rms_norm is used elsewhere too"),
    ],
)
def test_norms_that_the_op_cannot_take_are_refused(function, reason):
    assert_refuses(FoldQKNorm(), function, make()(5), {reason: 1}, tokens_dim=TOKENS)


def test_a_norm_over_all_heads_is_refused():
    def full_width(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight):
        q, k = norm(q.flatten(-2), q_weight), norm(k.flatten(-2), k_weight)
        q, k = q.view(1, q.shape[1], -1, D)[0], k.view(1, k.shape[1], -1, D)[0]
        return write(q, k, v, cos, sin, k_cache, v_cache, slots)

    reason = "the norm spans all heads, not each one"
    assert_refuses(FoldQKNorm(), full_width, make(width=H)(5), {reason: 1}, tokens_dim=TOKENS)
