"""Rotary tables: transformers' numbers, and right for every position that a context can have."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ostinato.ops import rope_table
from ostinato.ops.rope_table import BLOCK, OP, rope_table_reference
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, ROUTES, assert_graph_replays, run, sized

LARGEST = 131072


def frequencies(half: int, base: float = 10_000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(half) / half)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_float64_within_the_budget(route: str, dtype: torch.dtype) -> None:
    tiny = [(0, 4), (1, 1), (3, 7), (2, 48), (BLOCK // 4 + 1, 4)]
    for tokens, half in sized(route, tiny, [*tiny, (16, 64), (8192, 64)]):
        positions = torch.randint(0, LARGEST, (tokens,))
        for scaling in (1.0, 1.2079441):
            args = (positions, frequencies(half), scaling, dtype)
            plain = rope_table_reference(*args)
            truth = rope_table_reference(positions, frequencies(half).double(), scaling, torch.float64)
            for ours, true, like in zip(run(route, rope_table, *args), truth, plain, strict=True):
                assert ours.is_contiguous()
                assert_within_budget(ours, true, like)


@pytest.mark.parametrize("route", ROUTES)
def test_large_angles_are_reduced_exactly(route: str) -> None:
    """The budget forgives twice the error of a float32 angle; the functions of that angle err by 2 ulp."""
    positions = torch.cat(
        (torch.tensor([0, 1, 710, 105615, 105616, LARGEST]), torch.arange(9000, 131000, 977))
    )
    inv_freq = torch.tensor([1.0, 0.7498942, 0.1])
    angles = (positions[:, None].float() * inv_freq).double().repeat(1, 2)
    cos, sin = run(route, rope_table, positions, inv_freq, 1.0, torch.float32)
    tolerance = 2 * torch.finfo(torch.float32).eps  # results are at most 1
    assert (cos.double() - angles.cos()).abs().max().item() <= tolerance
    assert (sin.double() - angles.sin()).abs().max().item() <= tolerance
    assert (cos[0].tolist(), sin[0].tolist()) == ([1.0] * 6, [0.0] * 6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 128},
    ],
    ids=lambda parameters: parameters["rope_type"],
)  # fmt: skip
def test_reference_is_bit_equal_to_transformers(parameters: dict[str, float], dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=parameters
    )
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 3, 1023, 17, 99999])
    wanted = rotary(torch.empty(0, dtype=dtype), positions[None])
    ours = OP(positions, rotary.inv_freq, rotary.attention_scaling, dtype)
    assert all(torch.equal(got, want[0]) for got, want in zip(ours, wanted, strict=True))
    assert (rotary.attention_scaling != 1.0) == (parameters["rope_type"] == "yarn")


@pytest.mark.parametrize("route", ROUTES)
def test_strided_inputs_are_right_and_halves_are_equal(route: str) -> None:
    positions, inv_freq = torch.arange(14)[::2], frequencies(10)[::2]
    cos, sin = run(route, rope_table, positions, inv_freq, 1.0, torch.float32)
    torch.testing.assert_close(cos[:, :5], (positions[:, None].float() * inv_freq).cos())
    for table in (cos, sin):
        assert torch.equal(table[:, :5], table[:, 5:])


def test_other_shapes_and_types_are_refused_with_both_sides_named() -> None:
    positions, inv_freq = torch.arange(3), frequencies(4)
    with pytest.raises(ValueError, match=r"positions has shape \[1, 3\]; it must be \[T\]"):
        OP(positions[None], inv_freq, 1.0, torch.float32)
    with pytest.raises(ValueError, match=r"inv_freq has shape \[1, 4\]; it must be \[F\]"):
        OP(positions, inv_freq[None], 1.0, torch.float32)
    with pytest.raises(ValueError, match=r"positions is torch.int32; allowed are int64"):
        OP(positions.int(), inv_freq, 1.0, torch.float32)
    with pytest.raises(ValueError, match=r"inv_freq is torch.bfloat16; allowed are float32, float64"):
        OP(positions, inv_freq.bfloat16(), 1.0, torch.float32)
    with pytest.raises(ValueError, match=r"dtype is torch.int64; allowed are float16, bfloat16"):
        OP(positions, inv_freq, 1.0, torch.int64)


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    inv_freq = frequencies(6)
    torch.library.opcheck(OP, (torch.arange(5), inv_freq, 1.5, torch.bfloat16))
    compiled = torch.compile(
        lambda positions: OP(positions, inv_freq, 1.5, torch.bfloat16)[1] * 2,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for tokens in (3, 7):
        positions = torch.arange(tokens) * 1000
        assert torch.equal(compiled(positions), OP(positions, inv_freq, 1.5, torch.bfloat16)[1] * 2)


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    old, new = torch.randint(0, LARGEST, (2, 16))
    constants = [frequencies(64), 1.0, torch.bfloat16]
    assert_graph_replays(rope_table, [old.clone(), *constants], [new.clone(), *constants])
