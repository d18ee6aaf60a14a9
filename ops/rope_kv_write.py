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
    has_pdl,
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
def turned(  # type: ignore[no-untyped-def]  # Triton
    source,
    live,
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
    """The heads that begin at `source` [rows], of one token, after norm and rotation; also for other kernels.

    float32 [rows, BLOCK]; each value is loaded with the other of its pair.
    """
    at = tl.arange(0, BLOCK)
    if INTERLEAVED:
        other, column, is_first = at ^ 1, at // 2, at % 2 == 0
    else:
        is_first = at < R // 2
        other, column = tl.where(is_first, at + R // 2, at - R // 2), at
    turns, there = at < R, live[:, None] & (at < D)[None, :]
    x = tl.load(source[:, None] + at[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.load(source[:, None] + other[None, :], mask=there & turns[None, :], other=0.0).to(tl.float32)
    if NORM:
        kept_type: tl.constexpr = source.dtype.element_ty
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x_weight = tl.load(weight + at, mask=at < D, other=0.0)[None, :]
        y_weight = tl.load(weight + other, mask=turns, other=0.0)[None, :]
        x = scaled(x, rstd, x_weight, offset, kept_type, ROUND_FIRST).to(tl.float32)
        y = scaled(y, rstd, y_weight, offset, kept_type, ROUND_FIRST).to(tl.float32)
    c = tl.load(cos + column, mask=turns, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + column, mask=turns, other=0.0).to(tl.float32)[None, :]
    return x * c + tl.where(is_first[None, :], -y, y) * s


@jit
def write_turned(  # type: ignore[no-untyped-def]  # Triton
    source,
    target,
    live,
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
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Norm and rotate the heads that begin at `source` [rows] into `target`; cos and sin [rows, HALF].

    Also for other kernels.
    """
    kept_type: tl.constexpr = source.dtype.element_ty
    i, j = tl.arange(0, HALF), R + tl.arange(0, REST)
    first = i * 2 if INTERLEAVED else i
    second = first + 1 if INTERLEAVED else i + R // 2
    turns, stays = live[:, None] & (i < R // 2)[None, :], live[:, None] & (j < D)[None, :]
    x = tl.load(source[:, None] + first[None, :], mask=turns, other=0.0).to(tl.float32)
    y = tl.load(source[:, None] + second[None, :], mask=turns, other=0.0).to(tl.float32)
    if R < D:
        z = tl.load(source[:, None] + j[None, :], mask=stays, other=0.0)
    if NORM:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        x_weight = tl.load(weight + first, mask=i < R // 2, other=0.0)[None, :]
        y_weight = tl.load(weight + second, mask=i < R // 2, other=0.0)[None, :]
        if R < D:
            squares += tl.sum(z.to(tl.float32) * z.to(tl.float32), 1)
        rstd = tl.rsqrt(squares / D + eps)[:, None]
        x = scaled(x, rstd, x_weight, offset, kept_type, ROUND_FIRST).to(tl.float32)
        y = scaled(y, rstd, y_weight, offset, kept_type, ROUND_FIRST).to(tl.float32)
        if R < D:
            z_weight = tl.load(weight + j, mask=j < D, other=0.0)[None, :]
            z = scaled(z.to(tl.float32), rstd, z_weight, offset, kept_type, ROUND_FIRST)
    tl.store(target[:, None] + first[None, :], (x * cos - y * sin).to(kept_type), mask=turns)
    tl.store(target[:, None] + second[None, :], (y * cos + x * sin).to(kept_type), mask=turns)
    if R < D:
        tl.store(target[:, None] + j[None, :], z, mask=stays)


@jit(do_not_specialize=["num_tokens"])
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
    num_tokens,
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
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of TOKENS tokens: of q, or, in the last programs, of k and v."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, TOKENS * HEADS)
    token = (tl.program_id(0) * TOKENS + row // HEADS).to(tl.int64)
    there = token < num_tokens
    i = tl.arange(0, HALF)
    turns = there[:, None] & (i < R // 2)[None, :]
    c = tl.load(cos + token[:, None] * cos_stride + i[None, :], mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * sin_stride + i[None, :], mask=turns, other=0.0).to(tl.float32)
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    part = tl.program_id(1)
    if part < Q_PARTS:
        head = part * HEADS + row % HEADS
        source = q + token * q_stride_t + head * q_stride_h
        target = out + (token * H + head) * D
        live = there & (head < H)
        write_turned(
            source,
            target,
            live,
            q_weight,
            c,
            s,
            eps,
            offset,
            D,
            R,
            NORM_Q,
            ROUND_FIRST,
            INTERLEAVED,
            HALF,
            REST,
        )
    else:
        head = (part - Q_PARTS) * HEADS + row % HEADS
        slot = tl.load(slots + token, mask=there, other=-1).to(tl.int64)
        block, place = slot // B, slot % B
        live = (slot >= 0) & (head < G)
        e = tl.arange(0, BLOCK_E)
        copied = live[:, None] & (e < E)[None, :]
        source = v + token * v_stride_t + head * v_stride_g
        target = v_cache + block * v_cache_stride_n + place * v_cache_stride_b + head * v_cache_stride_g
        values = tl.load(source[:, None] + e[None, :], mask=copied)
        tl.store(target[:, None] + e[None, :], values, mask=copied)
        source = k + token * k_stride_t + head * k_stride_g
        target = k_cache + block * k_cache_stride_n + place * k_cache_stride_b + head * k_cache_stride_g
        write_turned(
            source,
            target,
            live,
            k_weight,
            c,
            s,
            eps,
            offset,
            D,
            R,
            NORM_K,
            ROUND_FIRST,
            INTERLEAVED,
            HALF,
            REST,
        )


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
    num_rotated, pdl = cos.shape[1], has_pdl(q)
    at_once = min(ceil_to_power_of_2(max(heads, kv_heads)), _HEADS)
    parts = -(-heads // at_once) + -(-kv_heads // at_once)
    with on_device(q):
        _kernel[-(-num_tokens // _TOKENS), parts](
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
            num_tokens,
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
            R=num_rotated,
            B=k_cache.shape[1],
            NORM_Q=q_weight_D is not None,
            NORM_K=k_weight_D is not None,
            ROUND_FIRST=round_first,
            INTERLEAVED=interleaved,
            TOKENS=_TOKENS,
            HEADS=at_once,
            HALF=ceil_to_power_of_2(num_rotated // 2),
            REST=ceil_to_power_of_2(head_size - num_rotated),
            BLOCK_E=ceil_to_power_of_2(v_size),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return out


# A program of 4 warps: one vector of 8 bf16 a thread for heads of 128. One choice for all numbers of tokens.
_TOKENS, _HEADS = 2, 8

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
