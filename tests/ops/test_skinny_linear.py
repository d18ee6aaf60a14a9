from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import skinny_gated, skinny_linear
from ostinato.ops.skinny_linear import CANDIDATES, OP, skinny_linear_reference
from ostinato.ops.skinny_rows import MAX_TOKENS, Config
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, ROUTES, assert_graph_replays, run, sized

TINY = [(1, 1, 1), (1, 5, 7), (3, 33, 40), (9, 17, 130), (16, 4, 64)]
TINY += [(0, 4, 8), (2, 0, 8), (2, 3, 0), (17, 5, 8)]
# SmolLM2 135M: qkv, down and a row; Llama 8B: down; unaligned rows; too many for the kernel
REAL = [(1, 960, 576), (5, 577, 1536), (16, 4096, 14336), (3, 33, 130), (17, 576, 576)]
FMA = Config(False, 2, 64, 4, 1)
DOT = Config(True, 16, 64, 4, 3)


def made(num_tokens: int, num_out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """x, weight, bias, norm_weight, eps, offset, round_first, residual; everything is there."""
    weight = torch.randn(num_out, width) / max(width, 1) ** 0.5
    x, bias, residual = (
        torch.randn(num_tokens, width) * 3,
        torch.randn(num_out),
        torch.randn(num_tokens, num_out),
    )
    parts = [x.to(dtype), weight.to(dtype), bias.to(dtype), torch.rand(width) + 0.5]
    return [*parts, 1e-6, 0.0, True, residual.to(dtype)]


def assert_right(ours: Tensor, args: list[Any]) -> None:
    assert ours.is_contiguous()
    wide = [arg.double() if isinstance(arg, Tensor) else arg for arg in args]
    assert_within_budget(ours, skinny_linear_reference(*wide), skinny_linear_reference(*args))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_float64_within_the_budget(route: str, dtype: torch.dtype) -> None:
    for shape in sized(route, TINY, REAL):
        args = made(*shape, dtype)
        assert_right(run(route, skinny_linear, *args), args)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_bias_norm_and_residual_may_each_be_missing(route: str, num_tokens: int) -> None:
    for present in sized(route, (0, 1, 2, 4, 7), (0, 7)):
        args = made(num_tokens, 24, 48)
        for bit, place in enumerate((2, 3, 7)):
            if not present >> bit & 1:
                args[place] = None
        assert_right(run(route, skinny_linear, *args), args)


@pytest.mark.parametrize("route", ROUTES)
def test_every_spelling_of_the_norm_is_right(route: str) -> None:
    for num_tokens, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float16)):
        for offset, round_first in ((0.0, True), (1.0, False), (0.0, False)):
            args = made(num_tokens, 8, 64, dtype)
            args[3] = args[3].to(dtype) - 0.5
            args[5:7] = offset, round_first
            assert_right(run(route, skinny_linear, *args), args)


@pytest.mark.parametrize("route", ROUTES)
def test_eps_decides_for_small_rows(route: str) -> None:
    for num_tokens in (1, 2):
        x, weight = torch.full((num_tokens, 64), 1e-3), torch.full((1, 64), 1 / 64)
        out = run(route, skinny_linear, x, weight, None, torch.ones(64), 1e-5, 0.0, True, None)
        assert out[0, 0].item() == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("route", ROUTES)
def test_a_token_gives_the_same_bits_whatever_is_beside_it(route: str) -> None:
    args = made(MAX_TOKENS, 40, 96)
    many = {}
    for num_tokens in range(1, MAX_TOKENS + 1):
        some = [args[0][:num_tokens], *args[1:7], args[7][:num_tokens]]
        many[num_tokens] = run(route, skinny_linear, *some)
        assert_right(many[num_tokens], some)
    if route != "reference":
        for fewest, most in ((3, 4), (5, 8), (9, 16)):  # each by one kernel
            assert all(torch.equal(many[n], many[most][:n]) for n in range(fewest, most))


def test_every_candidate_and_every_split_is_right() -> None:
    if torch.cuda.is_available():
        pytest.skip("the benchmark checks every candidate on a GPU")
    for config in (*CANDIDATES, FMA, DOT, DOT._replace(split=3), DOT._replace(split=5)):
        for num_tokens in (2, 9) if config.by_tensor_cores else (1, 3, 9):
            args = made(num_tokens, config.rows + 1, config.block_k + 12)
            assert_right(skinny_linear.launch(*args, config=config), args)


@pytest.mark.parametrize("route", ROUTES)
def test_large_fp16_values_do_not_leave_their_range(route: str) -> None:
    for num_tokens in (1, 2):
        args = made(num_tokens, 16, 80, torch.float16)
        args[0] = torch.full((num_tokens, 80), 3e4).half()
        args[0][:, ::2] *= -2  # its product with a norm weight above 1.1 is over 65504
        args[3] = torch.full((80,), 4.0)
        assert_right(run(route, skinny_linear, *args), args)


@pytest.mark.parametrize("route", ROUTES)
def test_strides_are_right_and_nothing_beside_a_view_is_read(route: str) -> None:
    for num_tokens in (1, 5):
        args = made(num_tokens, 33, 70)
        for place, shape in ((0, (16, 80)), (1, (40, 96)), (7, (16, 56))):
            wide = torch.full(shape, float("nan")).bfloat16()
            view = wide[: args[place].shape[0], 8 : 8 + args[place].shape[1]]
            args[place] = view.copy_(args[place])
        args[2], args[3] = torch.randn(66).bfloat16()[::2], torch.rand(140)[::2]
        assert_right(run(route, skinny_linear, *args), args)
        args[0] = torch.randn(70, num_tokens).bfloat16().T
        assert_right(run(route, skinny_linear, *args), args)


@pytest.mark.parametrize("route", ROUTES)
def test_leading_sizes_are_kept(route: str) -> None:
    args = made(6, 16, 32)
    flat = run(route, skinny_linear, *args)
    for shape in ((1, 6), (2, 3)):
        deep = [args[0].view(*shape, 32), *args[1:7], args[7].view(*shape, 16)]
        assert torch.equal(run(route, skinny_linear, *deep), flat.view(*shape, 16))


def test_more_tokens_than_the_kernel_takes_go_through_the_parts() -> None:
    args = made(MAX_TOKENS + 1, 16, 32)
    if torch.cuda.is_available():
        pytest.skip("the CPU's parts are the reference, bit by bit")
    assert torch.equal(skinny_linear._launch(*args), skinny_linear_reference(*args))


def test_what_does_not_fit_is_refused_with_both_sides_named() -> None:
    x, weight = torch.randn(5, 16), torch.randn(8, 16)
    rest = (None, None, 0.0, 0.0, False, None)
    with pytest.raises(ValueError, match=r"weight has shape \[8, 15\], x \[5, 16\]: \[K\] is 15 and 16"):
        OP(x, weight[:, 1:], *rest)
    with pytest.raises(ValueError, match=r"bias has shape \[1\], weight \[8, 16\]: \[N\] is 1 and 8"):
        OP(x, weight, torch.ones(1), *rest[1:])
    with pytest.raises(ValueError, match=r"residual has shape \[1, 8\], x \[5, 16\]"):
        OP(x, weight, *rest[:-1], torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16 but x is torch.float32"):
        OP(x, weight.bfloat16(), *rest)
    with pytest.raises(
        ValueError, match=r"norm_weight is torch.float16; it must be float32 or torch.bfloat16"
    ):
        OP(x.bfloat16(), weight.bfloat16(), None, torch.ones(16).half(), *rest[2:])
    with pytest.raises(ValueError, match=r"x is torch.float64; allowed are float16, bfloat16, float32"):
        skinny_linear.launch(x.double(), weight.double())
    with pytest.raises(ValueError, match=r"weight has strides \(1, 8\); the last one must be 1 on a GPU"):
        skinny_linear.launch(x, torch.randn(16, 8).T)
    with pytest.raises(ValueError, match=r"for float32, which tensor cores would round"):
        skinny_linear.launch(x, weight, config=DOT)
    with pytest.raises(ValueError, match=r"only the tensor core kernel splits columns; use split=1"):
        skinny_linear.launch(x, weight, config=FMA._replace(split=2))


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    args = made(5, 16, 24, torch.float32)
    torch.library.opcheck(OP, args)
    torch.library.opcheck(OP, [*args[:2], None, None, *args[4:7], None])
    compiled = torch.compile(
        lambda x: OP(x, *args[1:7], None) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for num_rows in (3, 7, 20):
        x = torch.randn(num_rows, 24)
        assert torch.equal(compiled(x), OP(x, *args[1:7], None) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_captured_graph_follows_its_inputs(num_tokens: int) -> None:
    old, new = made(num_tokens, 4096, 4096), made(num_tokens, 4096, 4096)
    assert_graph_replays(skinny_linear, old, new)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_overlapping_kernels_wait_for_each_other(num_tokens: int) -> None:
    """A captured chain, where each kernel starts early, gives what kernels one at a time give."""
    *_, weight_out, bias, norm, eps, offset, first, x = (
        arg.cuda() if isinstance(arg, Tensor) else arg for arg in made(num_tokens, 576, 1536)
    )
    weight_in = (torch.randn(3072, 576, device="cuda") / 24).bfloat16()

    def step(x: Tensor, *, is_alone: bool) -> Tensor:
        for layer in range(12):
            h = skinny_gated.OP(x, weight_in, norm[:576], eps, offset, first, "silu")
            if is_alone:
                torch.cuda.synchronize()
            config = Config(True, 32, 128, 4, 4, split=2) if num_tokens > 1 and layer % 2 else None
            x = skinny_linear.launch(h, weight_out, bias, norm, eps, offset, first, x, config=config)
            if is_alone:
                torch.cuda.synchronize()
        return x

    expected = step(x, is_alone=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained = step(x, is_alone=False)
    for _ in range(50):
        chained.fill_(float("nan"))
        graph.replay()
        assert torch.equal(chained, expected)
