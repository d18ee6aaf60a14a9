import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ostinato.ops import rms_norm
from ostinato.ops.rms_norm import OP, rms_norm_reference
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, ROUTES, assert_graph_replays, run, sized

TINY = [(0, 8), (1, 1), (3, 96), (2, 3, 5), (1, 5121), (3, 0)]
REAL = [*TINY, (1, 4096), (130, 5121), (2048, 8192), (7, 16384)]
SPELLINGS = {
    "llama": (0.0, True),
    "gemma": (1.0, False),
    "olmo2": (0.0, False),
    "offset_then_round": (1.0, True),
}


def assert_right(
    route: str, x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, round_first: bool = True
) -> Tensor:
    ours = run(route, rms_norm, x, weight, eps, offset, round_first)
    assert ours.is_contiguous()
    truth = rms_norm_reference(x.double(), weight.double(), eps, offset, round_first)
    assert_within_budget(ours, truth, rms_norm_reference(x, weight, eps, offset, round_first))
    return ours


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_spelling_matches_float64_within_the_budget(route: str, dtype: torch.dtype) -> None:
    for shape in sized(route, TINY, REAL):
        x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
        for offset, round_first in SPELLINGS.values():
            assert_right(route, x, weight.to(dtype), offset=offset, round_first=round_first)
            assert_right(route, x, weight, offset=offset, round_first=round_first)  # float32 weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("norm_class", "spelling"), [(LlamaRMSNorm, "llama"), (GemmaRMSNorm, "gemma"), (Olmo2RMSNorm, "olmo2")]
)
def test_reference_is_bit_equal_to_transformers(
    norm_class: type[nn.Module], spelling: str, dtype: torch.dtype
) -> None:
    norm = norm_class(96).to(dtype)
    norm.weight.data = torch.randn(96).to(dtype)
    x = torch.randn(7, 96).to(dtype)
    with torch.no_grad():
        assert torch.equal(OP(x, norm.weight, 1e-6, *SPELLINGS[spelling]), norm(x))


@pytest.mark.parametrize("route", ROUTES)
def test_gemma_norm_of_bf16_with_a_float32_weight_keeps_bf16(route: str) -> None:
    for num_rows in (1, 2, 3, 7, sized(route, 8, 128)):
        x = torch.randn(num_rows, 64).bfloat16()
        for weight in (torch.zeros(64), torch.randn(64)):
            assert assert_right(route, x, weight, offset=1.0, round_first=False).dtype == torch.bfloat16
        for minus_one in (torch.full((64,), -1.0), torch.full((64,), -1.0, dtype=torch.bfloat16)):
            assert run(route, rms_norm, x, minus_one, 1e-6, 1.0, False).count_nonzero() == 0


@pytest.mark.parametrize("route", ROUTES)
def test_eps_decides_for_small_rows(route: str) -> None:
    x, weight = torch.full((1, 96), 1e-3), torch.ones(96)
    for eps in (1e-5, 1e-6):
        out = assert_right(route, x, weight, eps=eps)
        assert out[0, 0].item() == pytest.approx(1e-3 / (1e-6 + eps) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_stay_zeros_and_large_values_do_not_overflow(route: str, dtype: torch.dtype) -> None:
    weight = torch.ones(80).to(dtype)
    assert run(route, rms_norm, torch.zeros(2, 80).to(dtype), weight, 1e-6, 0.0, True).count_nonzero() == 0
    large = torch.full((1, 80), 6e4).to(dtype)  # its square overflows fp16
    near_one = pytest.approx([1.0] * 80, rel=torch.finfo(dtype).eps)
    assert run(route, rms_norm, large, weight, 1e-6, 0.0, True)[0].tolist() == near_one
    assert_right(route, torch.randn(2, 80).to(dtype) * 1e-4, weight)


@pytest.mark.parametrize("route", ROUTES)
def test_any_strides_are_right(route: str) -> None:
    weight = torch.randn(24)
    assert_right(route, torch.randn(5, 48)[:, :24], weight)
    assert_right(route, torch.randn(24, 5).T, weight)
    assert_right(route, torch.randn(5, 4 * 24).view(5, 4, 24)[:, 1:3], torch.randn(48)[::2])


def test_other_shapes_and_types_are_refused_with_both_sides_named() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    with pytest.raises(ValueError, match=r"weight has shape \[1\], x \[5, 16\]: \[D\] is 1 and 16"):
        OP(x, torch.ones(1), 1e-6, 0.0, True)
    with pytest.raises(ValueError, match=r"weight has shape \[1, 16\]; it must be \[D\]"):
        OP(x, weight[None], 1e-6, 0.0, True)
    with pytest.raises(
        ValueError, match=r"weight is torch.float16; it must be float32 or torch.bfloat16 like x"
    ):
        OP(x.bfloat16(), weight.half(), 1e-6, 0.0, True)
    with pytest.raises(ValueError, match=r"x is torch.int64"):
        OP(x.long(), weight, 1e-6, 0.0, True)


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    weight = torch.randn(24)
    torch.library.opcheck(OP, (torch.randn(5, 48)[:, :24], weight, 1e-6, 1.0, False))
    compiled = torch.compile(
        lambda x: OP(x, weight, 1e-6, 0.0, True) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for num_rows in (3, 7):
        x = torch.randn(num_rows, 24)
        assert torch.equal(compiled(x), OP(x, weight, 1e-6, 0.0, True) * 2)


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    old, new = torch.randn(2, 33, 4096).bfloat16()
    weight = torch.randn(2, 4096)
    assert_graph_replays(
        rms_norm, [old, weight[0], 1e-6, 0.0, True], [new, weight[1].clone(), 1e-6, 0.0, True]
    )
