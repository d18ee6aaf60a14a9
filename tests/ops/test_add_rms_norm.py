import pytest
import torch
from torch import Tensor

from ostinato.ops import add_rms_norm, rms_norm
from ostinato.ops.add_rms_norm import OP, add_rms_norm_reference
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, INTERPRETER, ROUTES, assert_graph_replays, run, sized

TINY = [(0, 8), (1, 1), (3, 96), (2, 3, 5), (1, 5121), (3, 0)]
REAL = [*TINY, (1, 4096), (130, 5121), (2048, 8192), (7, 16384)]


def assert_right(
    route: str, x: Tensor, residual: Tensor, weight: Tensor, offset: float = 0.0, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    ours = run(route, add_rms_norm, x, residual, weight, 1e-6, offset, round_first)
    plain = add_rms_norm_reference(x, residual, weight, 1e-6, offset, round_first)
    truth = add_rms_norm_reference(x.double(), residual.double(), weight.double(), 1e-6, offset, round_first)
    for one, true, simple in zip(ours, truth, plain, strict=True):
        assert one.is_contiguous()
        assert_within_budget(one, true, simple)
    if not (route == INTERPRETER and x.dtype == torch.bfloat16):  # there, casts to bf16 cut off
        assert torch.equal(ours[1], x + residual)
    return ours


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_both_outputs_match_float64_within_the_budget(route: str, dtype: torch.dtype) -> None:
    for shape in sized(route, TINY, REAL):
        x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) * 4
        weight = torch.randn(shape[-1])
        for offset, round_first in ((0.0, True), (1.0, False), (0.0, False)):
            assert_right(route, x, residual, weight.to(dtype), offset, round_first)
            assert_right(route, x, residual, weight, offset, round_first)


@pytest.mark.parametrize("route", ROUTES)
def test_the_norm_is_of_the_rounded_sum(route: str) -> None:
    x, residual = torch.randn(2, 3, 96).half()
    normed, total = run(route, add_rms_norm, x, residual, torch.ones(96), 1e-6, 0.0, False)
    of_sum = run(route, rms_norm, total, torch.ones(96), 1e-6, 0.0, False)
    # the norm of the exact sum has another last bit in a quarter of the places
    assert (normed != of_sum).sum() <= 3


@pytest.mark.parametrize("route", ROUTES)
def test_weight_of_minus_one_gives_zeros_and_keeps_the_sum(route: str) -> None:
    for num_rows in (1, 2, 3, 7):
        x, residual = torch.randn(2, num_rows, 64).bfloat16()
        normed, _ = assert_right(route, x, residual, torch.full((64,), -1.0), 1.0, False)
        assert normed.count_nonzero() == 0


@pytest.mark.parametrize("route", ROUTES)
def test_one_tensor_as_both_inputs_and_any_strides_are_right(route: str) -> None:
    x, weight = torch.randn(5, 24), torch.randn(24)
    assert_right(route, x, x, weight)
    assert_right(route, torch.randn(24, 5).T, torch.randn(5, 48)[:, 24:], weight)
    assert_right(route, torch.randn(1, 24).expand(5, 24), x, weight)


def test_inputs_are_left_as_they_were() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    kept = x.clone(), residual.clone()
    normed, total = OP(x, residual, weight, 1e-6, 0.0, True)
    total.zero_()
    normed.zero_()
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_a_float32_residual_and_a_broadcast_are_refused() -> None:
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(16)
    with pytest.raises(ValueError, match=r"residual is torch.float32 but x is torch.bfloat16"):
        OP(x, x.float(), weight, 1e-6, 0.0, True)
    with pytest.raises(ValueError, match=r"residual has shape \[1, 16\], x \[5, 16\]"):
        OP(x, x[:1], weight, 1e-6, 0.0, True)


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    weight = torch.randn(24)
    torch.library.opcheck(OP, (torch.randn(5, 48)[:, :24], torch.randn(5, 24), weight, 1e-6, 1.0, False))

    def layer(x: Tensor) -> Tensor:  # the sum is used twice more
        normed, total = OP(x, x.sin(), weight, 1e-6, 0.0, True)
        return normed + total * total

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_rows in (3, 7):
        x = torch.randn(num_rows, 24)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    old, new = torch.randn(2, 2, 33, 4096).bfloat16()
    weight = torch.randn(2, 4096)
    assert_graph_replays(
        add_rms_norm, [*old, weight[0], 1e-6, 0.0, True], [*new, weight[1].clone(), 1e-6, 0.0, True]
    )
