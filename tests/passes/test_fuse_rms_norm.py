"""Every spelling of RMSNorm, with the graph's own eps, types and sizes (case B25)."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.passes.fuse_rms_norm import FuseRMSNorm
from tests.support.graphs import assert_fuses, assert_refuses, trace


def llama(eps):
    def norm(x, weight):
        wide = x.to(torch.float32)
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * xhat.to(x.dtype)

    return norm


def gemma(eps):
    def norm(x, weight):
        wide = x.float()
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (xhat * (1.0 + weight.float())).type_as(x)

    return norm


def olmo2(eps):
    def norm(x, weight):
        wide = x.to(torch.float32)
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * xhat).to(x.dtype)

    return norm


def gemma4(eps):
    def norm(x, weight):
        wide = x.float()
        xhat = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
        return (xhat * weight.float()).type_as(x)

    return norm


def library(eps):
    return lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, eps)


SPELLINGS = [llama, gemma, olmo2, gemma4, library]
ARGUMENTS = {  # spelling -> (offset, round_first) of the op
    llama: (0.0, True),
    gemma: (1.0, False),
    olmo2: (0.0, False),
    gemma4: (0.0, False),
    library: (0.0, False),
}


def arguments_of(graph):
    (node,) = [n for n in graph.graph.nodes if "rms_norm" in str(n.target)]
    return node.args[2:]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "bfloat16")], ids=["fp32", "bf16"])
def test_fuses_every_spelling_in_every_type(spelling, types):
    x_type, weight_type = (getattr(torch, t) for t in types)

    def make(tokens):
        return [torch.randn(1, tokens, 96).to(x_type), torch.randn(96).to(weight_type)]

    assert_fuses(FuseRMSNorm(), spelling(1e-6), make, {"rms_norm": 1}, tokens_dim={0: 1})


@pytest.mark.parametrize("spelling", [gemma, olmo2])
@pytest.mark.parametrize("fill", [None, 0.0, -1.0])
def test_fuses_a_float32_weight_with_bf16_activations(spelling, fill):
    def make(tokens):
        weight = torch.randn(64) if fill is None else torch.full((64,), fill)
        return [torch.randn(tokens, 64).bfloat16(), weight]

    assert_fuses(FuseRMSNorm(), spelling(1e-6), make, {"rms_norm": 1})


def test_a_norm_that_promotes_to_the_type_of_its_weight_is_refused():
    tensors = [torch.randn(5, 64).bfloat16(), torch.randn(64)]
    reason = "the graph's result is float32, the op would give bfloat16"
    assert_refuses(FuseRMSNorm(), llama(1e-6), tensors, {reason: 1})


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1.5625e-07, 3])
def test_eps_offset_and_rounding_come_from_the_graph(spelling, eps):
    graph = trace(spelling(eps), torch.randn(5, 8).bfloat16(), torch.randn(8).bfloat16())
    assert FuseRMSNorm()(graph).matched == 1
    assert arguments_of(graph) == (eps, *ARGUMENTS[spelling])


def test_heads_are_normed_each_on_its_own():
    def make(tokens):
        return [torch.randn(1, tokens, 4, 16), torch.randn(16)]

    assert_fuses(FuseRMSNorm(), llama(1e-5), make, {"rms_norm": 1}, tokens_dim={0: 1})


@pytest.mark.parametrize("width", [1, 5121])
def test_widths_that_are_no_power_of_two(width):
    def make(tokens):
        return [torch.randn(tokens, width), torch.randn(width)]

    assert_fuses(FuseRMSNorm(), llama(1e-5), make, {"rms_norm": 1})


def without_weight(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def layer_norm(x, weight):
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6))


def over_the_tokens(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6))


def of_the_sum(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6))


def of_cubes(x, weight):
    return weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))


def of_another(x, weight, y):
    return weight * (y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def with_a_scalar_weight(x, weight):
    return weight[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def with_a_second_user(x, weight):
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x * root), root


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_weight, "the norm has no weight"),
        (layer_norm, "the mean is taken off first: a LayerNorm"),
        (over_the_tokens, "mean takes 0 as dim, the pattern 1"),
        (of_the_sum, "the root is not taken of a mean of squares plus a number"),
        (of_cubes, "pow takes 3 as exponent, the pattern 2"),
        (of_another, "x would be two values"),
        (with_a_scalar_weight, "the weight does not have the size of the last dimension"),
        (with_a_second_user, "the intermediate result of rsqrt is used elsewhere too"),
    ],
)
def test_near_misses_are_refused_with_what_differs(function, reason):
    tensors = [torch.randn(5, 8), torch.randn(8), torch.randn(5, 8)][: function.__code__.co_argcount]
    dims = {0: 0, 2: 0} if len(tensors) == 3 else None
    assert_refuses(FuseRMSNorm(), function, tensors, {reason: 1}, tokens_dim=dims)
