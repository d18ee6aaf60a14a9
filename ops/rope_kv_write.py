"""Rotary embedding of q and k, after a norm per head if asked, then K and V into the paged cache.

Shapes: T tokens, H query heads, G KV heads, D and E sizes of a K and a V head, R rotated values of a head
(even, R <= D; the first R of D rotate, the rest passes).  q [T, H, D], k [T, G, D], v [T, G, E] with any
strides; q_weight and k_weight [D] or None; planes and slot_mapping as in kv_write.  The rotated q
[T, H, D] is returned, new and contiguous.
cos and sin [T, R] as transformers makes them, the second half equal to the first.
Pairs are (i, i + R/2) with cos[:, i], or with `interleaved` (2i, 2i + 1) with cos[:, i].
Types: fp16, bf16, fp32, fp64, all alike; weights, cos and sin in that type or float32.
Rounding: the norm as rms_norm (eps, offset, round_first), rounded to the type; then the rotation.  The
reference rounds as `x * cos + rotate_half(x) * sin` does in the given types; the kernel rounds the rotation
once.
Sources: arXiv:2104.09864 (rotary), arXiv:2010.04245 (norm of q and k).
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ostinato.ops.check import (
    FLOATS,
    INTEGERS,
    check_dense_planes,
    check_device,
    check_scale_type,
    check_shapes,
    check_types,
)
from ostinato.ops.kv_write import kv_write_reference
from ostinato.ops.launch import (
    KERNEL_FLOATS,
    as_rows,
    ceil_to_power_of_2,
    jit,
    on_device,
    tl,
    with_dense_heads,
)
from ostinato.ops.rms_norm import rms_norm_reference, scaled


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
    pairs = "t h (r pair)" if interleaved else "t h (pair r)"
    first, second = rearrange(x, f"{pairs} -> pair t h r", pair=2)
    turned = rearrange([-second, first], f"pair t h r -> {pairs}")
    rotated = x * cos_TR[:, None] + turned * sin_TR[:, None]
    return torch.cat((rotated.to(x.dtype), rest), -1)


@jit
def _rotated(  # type: ignore[no-untyped-def]  # Triton
    head,
    weight,
    cos,
    sin,
    eps,
    offset,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK values of one head after norm and rotation; each value is loaded with the other of its pair."""
    at = tl.arange(0, BLOCK)
    if INTERLEAVED:
        other, column, is_first = at ^ 1, at // 2, at % 2 == 0
    else:
        is_first = at < R // 2
        other, column = tl.where(is_first, at + R // 2, at - R // 2), at
    turns = at < R
    x = tl.load(head + at, mask=at < D, other=0.0).to(tl.float32)
    y = tl.load(head + other, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        kept_type: tl.constexpr = head.dtype.element_ty
        rstd = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x_weight = tl.load(weight + at, mask=at < D, other=0.0)
        y_weight = tl.load(weight + other, mask=turns, other=0.0)
        x = scaled(x, rstd, x_weight, offset, kept_type, ROUND_FIRST).to(tl.float32)
        y = scaled(y, rstd, y_weight, offset, kept_type, ROUND_FIRST).to(tl.float32)
    c = tl.load(cos + column, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + column, mask=turns, other=0.0).to(tl.float32)
    return x * c + tl.where(is_first, -y, y) * s


@jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    q_weight,
    k_weight,
    out,
    eps,
    offset,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_g,
    v_stride_t,
    v_stride_g,
    cos_stride,
    sin_stride,
    k_cache_stride_n,
    k_cache_stride_b,
    k_cache_stride_g,
    v_cache_stride_n,
    v_cache_stride_b,
    v_cache_stride_g,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token: H of q, then G of k, then G of v."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset_in_block = slot // B, slot % B
    at = tl.arange(0, BLOCK)
    cos += token * cos_stride
    sin += token * sin_stride
    if head < H:
        source = q + token * q_stride_t + head * q_stride_h
        turned = _rotated(
            source, q_weight, cos, sin, eps, offset, D, R, NORM_Q, ROUND_FIRST, INTERLEAVED, BLOCK
        )
        tl.store(out + (token * H + head) * D + at, turned.to(out.dtype.element_ty), mask=at < D)
    elif head < H + G:
        source = k + token * k_stride_t + (head - H) * k_stride_g
        turned = _rotated(
            source, k_weight, cos, sin, eps, offset, D, R, NORM_K, ROUND_FIRST, INTERLEAVED, BLOCK
        )
        k_place = k_cache + block * k_cache_stride_n + offset_in_block * k_cache_stride_b
        k_place += (head - H) * k_cache_stride_g
        tl.store(k_place + at, turned.to(out.dtype.element_ty), mask=at < tl.where(slot >= 0, D, 0))
    else:
        live = at < tl.where(slot >= 0, E, 0)
        value = tl.load(v + token * v_stride_t + (head - H - G) * v_stride_g + at, mask=live)
        v_place = v_cache + block * v_cache_stride_n + offset_in_block * v_cache_stride_b
        tl.store(v_place + (head - H - G) * v_cache_stride_g + at, value, mask=live)


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
        q=(q_THD, "T H D"),
        k=(k_TGD, "T G D"),
        v=(v_TGE, "T G E"),
        k_cache=(k_cache, "N B G D"),
        v_cache=(v_cache, "N B G E"),
        slot_mapping=(slots_T, "T"),
        **{name: (scale, "T R" if name in ("cos", "sin") else "D") for name, scale in scales.items()},
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


def _on_cpu(*args: Any) -> Tensor:
    _check(*args[:10])
    return rope_kv_write_reference(*args)


def _launch(
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
    check_types("rope_kv_write", KERNEL_FLOATS, q=q_THD)
    check_dense_planes("rope_kv_write", k_cache=k_cache, v_cache=v_cache)
    out = q_THD.new_empty(q_THD.shape)
    if out.numel() == 0:
        return out
    num_tokens, heads, head_size = q_THD.shape
    _, kv_heads, v_size = v_TGE.shape
    q, k, v = with_dense_heads(q_THD), with_dense_heads(k_TGD), with_dense_heads(v_TGE)
    cos, sin = as_rows(cos_TR), as_rows(sin_TR)
    with on_device(q):
        _kernel[num_tokens, heads + 2 * kv_heads](
            q,
            k,
            v,
            cos,
            sin,
            k_cache,
            v_cache,
            slots_T.contiguous(),
            q if q_weight_D is None else q_weight_D.contiguous(),
            k if k_weight_D is None else k_weight_D.contiguous(),
            out,
            eps,
            offset,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            H=heads,
            G=kv_heads,
            D=head_size,
            E=v_size,
            R=cos.shape[1],
            B=k_cache.shape[1],
            NORM_Q=q_weight_D is not None,
            NORM_K=k_weight_D is not None,
            ROUND_FIRST=round_first,
            INTERLEAVED=interleaved,
            BLOCK=ceil_to_power_of_2(max(head_size, v_size)),
            num_warps=1,
        )
    return out


torch.library.define(
    "ostinato::rope_kv_write",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor? q_weight, Tensor? k_weight, float eps, float offset, bool round_first, "
    "bool interleaved) -> Tensor",
)
torch.library.impl("ostinato::rope_kv_write", "CPU", _on_cpu)
torch.library.impl("ostinato::rope_kv_write", "CUDA", _launch)


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
