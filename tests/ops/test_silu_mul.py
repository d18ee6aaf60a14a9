import pytest
import torch
from torch import Tensor

from ostinato.ops import silu_mul
from ostinato.ops.silu_mul import BLOCK, OP, silu_mul_reference
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, ROUTES, assert_graph_replays, run, sized

TINY = [(0, 8), (1, 1), (3, 7), (2, 3, 5), (2, BLOCK + 1), (3, 0)]
REAL = [*TINY, (1, 14336), (517, 8960), (1024, 14336)]  # widths of Llama 8B and Qwen2 1.5B


def assert_right(route: str, gate: Tensor, up: Tensor) -> None:
    ours = run(route, silu_mul, gate, up)
    assert ours.is_contiguous()
    assert_within_budget(ours, silu_mul_reference(gate.double(), up.double()), silu_mul_reference(gate, up))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_float64_within_the_budget(route: str, dtype: torch.dtype) -> None:
    for shape in sized(route, TINY, REAL):
        assert_right(route, torch.randn(shape).to(dtype) * 3, torch.randn(shape).to(dtype))


@pytest.mark.parametrize("route", ROUTES)
def test_huge_gates_give_the_gate_or_zero(route: str) -> None:
    gate = torch.tensor([[6e4, -6e4, 0.0, 90.0, -90.0, 1e-6]])
    for dtype in FLOATS:
        assert_right(route, gate.to(dtype), torch.ones_like(gate).to(dtype))
    out = run(route, silu_mul, gate, torch.full_like(gate, 0.5))
    assert out[0, :3].tolist() == [3e4, 0.0, 0.0]


@pytest.mark.parametrize("route", ROUTES)
def test_halves_of_a_merged_tensor_and_any_strides_are_right(route: str) -> None:
    merged = torch.randn(5, 2 * 24)
    assert_right(route, merged[:, :24], merged[:, 24:])
    deep = torch.randn(2, 3, 4, 2 * 6)
    assert_right(route, deep[:, ::2, :, :6], deep[:, ::2, :, 6:])
    assert_right(route, torch.randn(6, 5).T, torch.randn(5, 6))
    assert_right(route, torch.randn(5, 12)[:, ::2], torch.randn(1, 6).expand(5, 6))


def test_other_shapes_and_types_are_refused_with_both_sides_named() -> None:
    gate = torch.randn(5, 16)
    with pytest.raises(ValueError, match=r"up has shape \[1, 16\], gate \[5, 16\]"):
        OP(gate, torch.randn(1, 16))
    with pytest.raises(ValueError, match=r"up is torch.bfloat16 but gate is torch.float32"):
        OP(gate, gate.bfloat16())
    with pytest.raises(ValueError, match=r"gate is torch.int64; allowed are float16, .*float64"):
        OP(gate.long(), gate.long())
    with pytest.raises(ValueError, match=r"gate is torch.float64; allowed are float16, bfloat16, float32"):
        silu_mul._launch(gate.double(), gate.double())


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    merged = torch.randn(5, 48)
    torch.library.opcheck(OP, (merged[:, :24], merged[:, 24:]))
    compiled = torch.compile(
        lambda x: OP(*x.chunk(2, 1)) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for num_rows in (3, 7):
        x = torch.randn(num_rows, 48)
        assert torch.equal(compiled(x), OP(*x.chunk(2, 1)) + 1)


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    old, new = torch.randn(2, 33, 4096).bfloat16(), torch.randn(2, 33, 4096).bfloat16()
    assert_graph_replays(silu_mul, old.unbind(), new.unbind())


@pytest.mark.gpu
def test_offsets_past_2_to_31_are_right() -> None:
    num_rows, width = 2**17 + 1, 2**14
    gate = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    gate[-1] = torch.randn(width)
    assert torch.equal(OP(gate, gate)[-1], OP(gate[-1:], gate[-1:])[0])
