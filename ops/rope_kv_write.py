"""Per-head norm (optional) and rotary embedding of q and k, then K and V into the paged cache; returns rotated q.

Shapes: T tokens, H query heads, G KV heads, D and E sizes of a K and a V head, R rotated values of a head (even,
R <= D; the first R of D rotate, the rest passes).  q [T, H, D], k [T, G, D], v [T, G, E] with any strides; q_weight
and k_weight [D] or None; planes and slot_mapping as in kv_write.  The returned q [T, H, D] is new and contiguous.
cos and sin [T, R] as transformers makes them, the second half equal to the first.  Pairs are (i, i + R/2) with
cos[:, i], or with `interleaved` (2i, 2i + 1) with cos[:, i].
Types: fp16, bf16, fp32, fp64, all alike; weights, cos and sin in that type or float32.
Rounding: the norm as rms_norm (eps, offset, round_first), rounded to the type; then the rotation.  The reference rounds
as `x * cos + rotate_half(x) * sin` does in the given types; the kernel rounds the rotation once.
Sources: arXiv:2104.09864 (rotary), arXiv:2010.04245 (norm of q and k).
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, INTEGERS, check_device, check_scale_type, check_shapes, check_types
from ostinato.ops.kv_write import kv_write_reference
from ostinato.ops.rms_norm import rms_norm_reference


def rope_kv_write_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    interleaved: bool,
) -> Tensor:
    if q_weight_D is not None:
        q_THD = rms_norm_reference(q_THD, q_weight_D, eps, offset, round_first)
    if k_weight_D is not None:
        k_TGD = rms_norm_reference(k_TGD, k_weight_D, eps, offset, round_first)
    kv_write_reference(rope_reference(k_TGD, cos_TR, sin_TR, interleaved), v_TGE, k_cache, v_cache, slots_T)
    return rope_reference(q_THD, cos_TR, sin_TR, interleaved)


def rope_reference(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
    num_rotated = cos_TR.shape[-1]
    half = num_rotated // 2
    x, rest = x_THD[..., :num_rotated], x_THD[..., num_rotated:]
    if interleaved:
        cos_TR, sin_TR = (table[:, :half].repeat_interleave(2, -1) for table in (cos_TR, sin_TR))
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    rotated = x * cos_TR[:, None] + turned * sin_TR[:, None]
    return torch.cat((rotated.to(x.dtype), rest), -1)


def _check(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
) -> None:
    op = "rope_kv_write"
    scales = {"cos": cos_TR, "sin": sin_TR}
    scales |= {} if q_weight_D is None else {"q_weight": q_weight_D}
    scales |= {} if k_weight_D is None else {"k_weight": k_weight_D}
    check_shapes(
        op,
        q=(q_THD, "THD"),
        k=(k_TGD, "TGD"),
        v=(v_TGE, "TGE"),
        k_cache=(k_cache, "NBGD"),
        v_cache=(v_cache, "NBGE"),
        slot_mapping=(slots_T, "T"),
        **{name: (scale, "TR" if name in ("cos", "sin") else "D") for name, scale in scales.items()},
    )
    num_rotated, head_size = cos_TR.shape[1], q_THD.shape[2]
    if num_rotated % 2 or num_rotated > head_size:
        raise ValueError(
            f"{op}: cos has {num_rotated} columns; it must be even and at most the head size {head_size}"
        )
    check_types(op, FLOATS, q=q_THD, k=k_TGD, v=v_TGE, k_cache=k_cache, v_cache=v_cache)
    for name, scale in scales.items():
        check_scale_type(op, "q", q_THD, name, scale)
    check_types(op, INTEGERS, slot_mapping=slots_T)
    check_device(op, "q", q_THD, "slot_mapping", slots_T)


def _on_cpu(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    *norm_and_layout: float,
) -> Tensor:
    _check(q_THD, k_TGD, v_TGE, cos_TR, sin_TR, k_cache, v_cache, slots_T, q_weight_D, k_weight_D)
    return rope_kv_write_reference(
        q_THD,
        k_TGD,
        v_TGE,
        cos_TR,
        sin_TR,
        k_cache,
        v_cache,
        slots_T,
        q_weight_D,
        k_weight_D,
        *norm_and_layout,
    )


torch.library.define(
    "ostinato::rope_kv_write",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor? q_weight, Tensor? k_weight, float eps, float offset, bool round_first, "
    "bool interleaved) -> Tensor",
)
torch.library.impl("ostinato::rope_kv_write", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::rope_kv_write")
def _fake(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    interleaved: bool,
) -> Tensor:
    _check(q_THD, k_TGD, v_TGE, cos_TR, sin_TR, k_cache, v_cache, slots_T, q_weight_D, k_weight_D)
    return q_THD.new_empty(q_THD.shape)


OP = torch.ops.ostinato.rope_kv_write.default
