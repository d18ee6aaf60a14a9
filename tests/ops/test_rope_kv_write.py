from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from ostinato.ops import rope_kv_write
from ostinato.ops.rope_kv_write import OP, rope_kv_write_reference
from tests.support.budget import assert_within_budget
from tests.support.op_cases import Heads, rope_case
from tests.support.op_routes import CUDA, FLOATS, ROUTES, assert_graph_replays, in_type, run, sized

# name -> options of rope_case
KINDS: dict[str, dict[str, Any]] = {
    "half": {},
    "half_norm": {"norm": True},
    "partial": {"num_rotated": 6},
    "partial_norm": {"num_rotated": 2, "norm": True},
    "interleaved": {"interleaved": True},
    "interleaved_partial_norm": {"num_rotated": 4, "interleaved": True, "norm": True},
}
TINY = [(0, Heads(2, 1, 8, 8)), (1, Heads(3, 1, 10, 16)), (4, Heads(2, 2, 12, 5))]
MAIN = [(1, Heads(32, 8, 128, 128)), (2049, Heads(32, 8, 128, 128))]  # the same kernels
REAL = [*TINY, *MAIN, (2049, Heads(9, 3, 64, 64)), (77, Heads(32, 32, 80, 80)), (130, Heads(8, 1, 256, 256))]


def results(route: str, args: list[Any]) -> list[Tensor]:
    """The rotated q and both planes after the call."""
    q = run(route, rope_kv_write, *args)
    assert q.is_contiguous()
    return [q, args[5], args[6]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_q_and_both_planes_match_float64_within_the_budget(kind: str, dtype: torch.dtype, route: str) -> None:
    if route == CUDA and dtype != torch.bfloat16 and kind not in ("half", "partial_norm"):
        pytest.skip("each is a kernel to compile, and these differ from others in nothing new")
    everything = kind == "half" and dtype == torch.bfloat16
    for num_tokens, heads in sized(route, TINY, REAL if everything else MAIN):
        args = rope_case(num_tokens, heads, dtype=dtype, **KINDS[kind])
        true_args, plain_args = in_type(torch.float64, args), in_type(dtype, args)
        truth = [rope_kv_write_reference(*true_args), true_args[5], true_args[6]]
        plain = [rope_kv_write_reference(*plain_args), plain_args[5], plain_args[6]]
        for one, true, simple in zip(results(route, args), truth, plain, strict=True):
            assert_within_budget(one, true, simple)
        assert torch.equal(args[6], plain_args[6])  # V is copied


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_multiplication_by_a_unit_complex_number(interleaved: bool) -> None:
    args = in_type(torch.float64, rope_case(5, Heads(3, 1, 10, 10), num_rotated=6, interleaved=interleaved))
    q, cos, sin = args[0], args[3], args[4]
    turn = torch.complex(cos[:, None, :3], sin[:, None, :3])
    real, imag = (q[..., :6:2], q[..., 1:6:2]) if interleaved else (q[..., :3], q[..., 3:6])
    product = torch.complex(real.contiguous(), imag.contiguous()) * turn
    out = OP(*args)
    real, imag = (out[..., :6:2], out[..., 1:6:2]) if interleaved else (out[..., :3], out[..., 3:6])
    torch.testing.assert_close(real, product.real)
    torch.testing.assert_close(imag, product.imag)
    assert torch.equal(out[..., 6:], q[..., 6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rotary", "options"),
    [
        (llama_rotary, {}),
        (glm_rotary, {"interleaved": True, "num_rotated": 8}),
    ],
)
def test_reference_is_bit_equal_to_transformers(
    rotary: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    args = rope_case(6, Heads(4, 2, 16, 16), dtype=dtype, **options)
    q, k, _, cos, sin = args[:5]
    expected_q, expected_k = rotary(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    assert torch.equal(OP(*args), expected_q[0].transpose(0, 1))
    live = args[7] >= 0
    assert torch.equal(args[5].flatten(0, 1)[args[7][live]], expected_k[0].transpose(0, 1)[live])


@pytest.mark.parametrize("route", ROUTES)
def test_float32_tables_and_weights_with_bf16_heads_give_bf16(route: str) -> None:
    args = rope_case(4, Heads(2, 1, 8, 8), norm=True)
    args[:3] = (part.bfloat16() for part in args[:3])
    args[5:7] = (plane.bfloat16() for plane in args[5:7])
    args[11], args[12] = 1.0, False  # gemma's norm
    true_args, plain_args = in_type(torch.float64, args), list(args)
    plain_args[5:7] = (plane.clone() for plane in args[5:7])
    truth = [rope_kv_write_reference(*true_args), *true_args[5:7]]
    plain = [rope_kv_write_reference(*plain_args), *plain_args[5:7]]
    for one, true, simple in zip(results(route, args), truth, plain, strict=True):
        assert_within_budget(one, true, simple)


@pytest.mark.parametrize("route", ROUTES)
def test_a_norm_on_q_alone_leaves_k_unscaled(route: str) -> None:
    args = rope_case(4, Heads(2, 1, 8, 8), norm=True)
    args[9] = None
    without = in_type(torch.float32, args)
    without[8] = None
    q, k_cache, _ = results(route, args)
    plain_q, plain_k, _ = results(route, without)
    assert torch.equal(k_cache, plain_k)
    assert not torch.allclose(q, plain_q)


@pytest.mark.parametrize("route", ROUTES)
def test_padding_rows_with_nan_write_nothing_and_stay_alone(route: str) -> None:
    args = rope_case(4, Heads(2, 1, 8, 8))
    clean = results(route, in_type(torch.float32, args))
    for part in args[:3]:
        part[0] = float("nan")  # its slot is -1
    q, k_cache, v_cache = results(route, args)
    assert torch.equal(q[1:], clean[0][1:])
    assert torch.equal(k_cache, clean[1])
    assert torch.equal(v_cache, clean[2])


def test_v_and_the_inputs_are_left_as_they_were() -> None:
    args = rope_case(5, Heads(2, 1, 8, 8))
    kept = [part.clone() for part in args[:5]]
    OP(*args)
    assert all(torch.equal(part, before) for part, before in zip(args[:5], kept, strict=True))


def test_odd_or_too_wide_tables_and_other_shapes_are_refused() -> None:
    args = rope_case(4, Heads(2, 1, 8, 8))

    def with_(at: int, value: Any) -> list[Any]:
        return [*args[:at], value, *args[at + 1 :]]

    three = args[3][:, :3]
    with pytest.raises(ValueError, match="cos has 3 columns; it must be even and at most the head size 8"):
        OP(*[*args[:3], three, three, *args[5:]])
    wide = torch.cat([args[3], args[3]], 1)
    with pytest.raises(ValueError, match="cos has 16 columns"):
        OP(*[*args[:3], wide, wide, *args[5:]])
    with pytest.raises(ValueError, match=r"sin has shape \[4, 6\], cos \[4, 8\]: \[R\] is 6 and 8"):
        OP(*with_(4, args[4][:, :6]))
    with pytest.raises(ValueError, match=r"k_weight has shape \[4\], q \[4, 2, 8\]: \[D\] is 4 and 8"):
        OP(*with_(9, torch.ones(4)))
    with pytest.raises(ValueError, match=r"cos is torch.float16; it must be float32 or torch.float32 like q"):
        OP(*with_(3, args[3].half()))


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    torch.library.opcheck(OP, tuple(rope_case(5, Heads(2, 1, 8, 12), norm=True, num_rotated=4)))

    def step(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return OP(q, k, v, *rest) + v.sum()  # V is read after the op

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 3):
        args, eager_args = (rope_case(num_tokens, Heads(2, 1, 8, 8)) for _ in range(2))
        for each in (args, eager_args):  # one cache size for both lengths
            each[5:7] = torch.zeros(4, 4, 1, 8), torch.zeros(4, 4, 1, 8)
        assert torch.equal(compiled(*args), step(*eager_args))
        assert torch.equal(args[5], eager_args[5])
        assert torch.equal(args[6], eager_args[6])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["half", "interleaved_partial_norm"])
def test_captured_graph_follows_its_inputs(kind: str) -> None:
    old, new = (
        rope_case(33, Heads(32, 8, 128, 128), dtype=torch.bfloat16, seed=seed, **KINDS[kind])
        for seed in (0, 1)
    )
    assert_graph_replays(rope_kv_write, old, new)
