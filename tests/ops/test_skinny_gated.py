from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import skinny_gated
from ostinato.ops.skinny_gated import CANDIDATES, OP, skinny_gated_reference
from ostinato.ops.skinny_rows import MAX_TOKENS, Config
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, ROUTES, assert_graph_replays, run, sized

TINY = [(1, 1, 1), (1, 5, 7), (3, 33, 40), (9, 17, 130), (16, 4, 64)]
TINY += [(0, 4, 8), (2, 0, 8), (2, 3, 0), (17, 5, 8)]
# SmolLM2 135M, one column more; Llama 8B; unaligned rows; too many for the kernel
REAL = [(1, 1536, 576), (5, 1537, 576), (16, 14336, 4096), (3, 33, 130), (17, 576, 576)]


def made(num_tokens: int, num_out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """x, weight, norm_weight, eps, offset, round_first, activation."""
    weight = 2 * torch.randn(2 * num_out, width) / max(width, 1) ** 0.5
    x = torch.randn(num_tokens, width) * 3
    return [x.to(dtype), weight.to(dtype), torch.rand(width) + 0.5, 1e-6, 0.0, True, "silu"]


def assert_right(ours: Tensor, args: list[Any]) -> None:
    assert ours.is_contiguous()
    wide = [arg.double() if isinstance(arg, Tensor) else arg for arg in args]
    assert_within_budget(ours, skinny_gated_reference(*wide), skinny_gated_reference(*args))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_float64_within_the_budget(route: str, dtype: torch.dtype) -> None:
    for shape in sized(route, TINY, REAL):
        args = made(*shape, dtype)
        assert_right(run(route, skinny_gated, *args), args)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_activations_and_spellings_of_the_norm_are_right(route: str, num_tokens: int) -> None:
    for activation in ("silu", "gelu_tanh"):
        for has_norm, offset, round_first in ((True, 0.0, True), (True, 1.0, False), (False, 0.0, False)):
            args = made(num_tokens, 24, 48)
            args[2] = args[2].bfloat16() - 0.5 if has_norm else None
            args[4:] = offset, round_first, activation
            assert_right(run(route, skinny_gated, *args), args)


@pytest.mark.parametrize("route", ROUTES)
def test_huge_gates_give_the_gate_or_zero(route: str) -> None:
    gate = torch.tensor([6e4, -6e4, 0.0, 90.0, -90.0])
    for num_tokens in (1, 2):
        x, weight = torch.zeros(num_tokens, 16), torch.zeros(10, 16)
        x[:, 0], weight[:5, 0], weight[5:, 0] = 1.0, gate, 0.5
        for activation in ("silu", "gelu_tanh"):
            out = run(route, skinny_gated, x.half(), weight.half(), None, 0.0, 0.0, False, activation)
            assert out.tolist() == [[3e4, 0.0, 0.0, 45.0, 0.0]] * num_tokens


@pytest.mark.parametrize("route", ROUTES)
def test_a_token_gives_the_same_bits_whatever_is_beside_it(route: str) -> None:
    args = made(MAX_TOKENS, 40, 96)
    many = {}
    for num_tokens in range(1, MAX_TOKENS + 1):
        some = [args[0][:num_tokens], *args[1:]]
        many[num_tokens] = run(route, skinny_gated, *some)
        assert_right(many[num_tokens], some)
    if route != "reference":
        for fewest, most in ((3, 4), (5, 8), (9, 16)):  # each by one kernel
            assert all(torch.equal(many[n], many[most][:n]) for n in range(fewest, most))


def test_every_candidate_is_right() -> None:
    if torch.cuda.is_available():
        pytest.skip("the benchmark checks every candidate on a GPU")
    for config in CANDIDATES:
        for num_tokens in (2, 9) if config.by_tensor_cores else (1, 3, 9):
            args = made(num_tokens, config.rows + 1, config.block_k + 12)
            assert_right(skinny_gated.launch(*args, config=config), args)


@pytest.mark.parametrize("route", ROUTES)
def test_strides_are_right_and_nothing_beside_a_view_is_read(route: str) -> None:
    for num_tokens in (1, 5):
        args = made(num_tokens, 17, 70)
        for place, shape in ((0, (16, 80)), (1, (40, 96))):
            wide = torch.full(shape, float("nan")).bfloat16()
            view = wide[: args[place].shape[0], 8 : 8 + args[place].shape[1]]
            args[place] = view.copy_(args[place])
        args[2] = torch.rand(140)[::2]
        assert_right(run(route, skinny_gated, *args), args)
        args[0] = torch.randn(70, num_tokens).bfloat16().T
        assert_right(run(route, skinny_gated, *args), args)


@pytest.mark.parametrize("route", ROUTES)
def test_leading_sizes_are_kept(route: str) -> None:
    args = made(6, 16, 32)
    flat = run(route, skinny_gated, *args)
    for shape in ((1, 6), (2, 3)):
        deep = run(route, skinny_gated, args[0].view(*shape, 32), *args[1:])
        assert torch.equal(deep, flat.view(*shape, 16))


def test_more_tokens_than_the_kernel_takes_go_through_the_parts() -> None:
    if torch.cuda.is_available():
        pytest.skip("the CPU's parts are the reference, bit by bit")
    for activation in ("silu", "gelu_tanh"):
        args = [*made(MAX_TOKENS + 1, 16, 32)[:-1], activation]
        assert torch.equal(skinny_gated._launch(*args), skinny_gated_reference(*args))


def test_what_does_not_fit_is_refused_with_both_sides_named() -> None:
    x, weight = torch.randn(5, 16), torch.randn(8, 16)
    rest = (None, 0.0, 0.0, False)
    with pytest.raises(ValueError, match=r"weight has shape \[8, 15\], x \[5, 16\]: \[K\] is 15 and 16"):
        OP(x, weight[:, 1:], *rest, "silu")
    with pytest.raises(ValueError, match=r"weight has 7 rows; they must be even, half gate and half up"):
        OP(x, weight[1:], *rest, "silu")
    with pytest.raises(ValueError, match=r"activation='relu'; it must be one of silu, gelu_tanh"):
        OP(x, weight, *rest, "relu")
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16 but x is torch.float32"):
        OP(x, weight.bfloat16(), *rest, "silu")
    with pytest.raises(ValueError, match=r"weight has strides \(1, 8\); the last one must be 1 on a GPU"):
        skinny_gated.launch(x, torch.randn(16, 8).T)
    with pytest.raises(ValueError, match=r"for float32, which tensor cores would round"):
        skinny_gated.launch(x, weight, config=Config(True, 16, 32, 4, 3))


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    args = made(5, 8, 24, torch.float32)
    torch.library.opcheck(OP, args)
    torch.library.opcheck(OP, [*args[:2], None, *args[3:]])
    compiled = torch.compile(
        lambda x: OP(x, *args[1:]) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for num_rows in (3, 7, 20):
        x = torch.randn(num_rows, 24)
        assert torch.equal(compiled(x), OP(x, *args[1:]) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_captured_graph_follows_its_inputs(num_tokens: int) -> None:
    assert_graph_replays(skinny_gated, made(num_tokens, 1536, 576), made(num_tokens, 1536, 576))
