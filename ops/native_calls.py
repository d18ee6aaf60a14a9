"""The native kernels as callables with the signatures of their torch ops: tensors in, tensors out.

Each call packs one struct of 8-byte fields, in the order of `struct Args` in the op's `.cpp`: with many
arguments that takes a quarter of the time of ctypes' own conversion. What a kernel does not take (another
type, wrong shapes) goes to the torch op, which computes it or raises with the reason.
"""

import ctypes
import itertools
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor

from ostinato.ops import (
    add_rms_norm,
    gelu_tanh_mul,
    kv_write,
    paged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
)

Kernel = Callable[[bytes], int]
MAX_HEAD = 1024  # as in rope_kv_write.cpp


def kernels(library: ctypes.CDLL, name: str) -> dict[torch.dtype, Kernel]:
    """The kernel `name` by the type of its tensors."""
    found: dict[torch.dtype, Kernel] = {}
    for suffix, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        function = getattr(library, f"{name}_{suffix}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_long
        found[dtype] = function
    return found


def row_stride(x: Tensor) -> int:
    """The stride between rows of `x` seen as [rows, x.shape[-1]], or -1 if no one number is."""
    shape, strides = x.shape, x.stride()
    if strides[-1] != 1 and shape[-1] > 1:
        return -1
    rows = [(size, stride) for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size != 1]
    if any(outer != inner * size for (_, outer), (size, inner) in itertools.pairwise(rows)):
        return -1
    return rows[-1][1] if rows else shape[-1]


def rows_of(x: Tensor, size: int) -> tuple[Tensor, int]:
    """`x` [..., size], or a copy where it has no row stride, and that stride."""
    if x.is_contiguous():
        return x, size
    stride = row_stride(x)
    return (x, stride) if stride >= 0 else (x.contiguous(), size)


def bind_rms_norm(library: ctypes.CDLL) -> Callable[..., Tensor]:
    by_type, pack = kernels(library, "rms_norm"), Struct("10q2dq").pack
    fallback, float32 = rms_norm.OP, torch.float32

    def call(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
        dtype, weight_dtype, shape = x.dtype, weight.dtype, x.shape
        size = shape[-1]
        kernel = by_type.get(dtype)
        if (
            kernel is None
            or weight.shape != (size,)
            or not (weight_dtype is dtype or weight_dtype is float32)
            or not weight.is_contiguous()
        ):
            return fallback(x, weight, eps, offset, round_first)
        out = x.new_empty(*shape)
        x, stride = rows_of(x, size)
        rows, is_wide, weight_at = out.numel() // (size or 1), weight_dtype is float32, weight.data_ptr()
        at = x.data_ptr(), stride, 0, 0, weight_at, is_wide, out.data_ptr(), 0, rows, size
        kernel(pack(*at, eps, offset, round_first))
        return out

    return call


def bind_add_rms_norm(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor]]:
    by_type, pack = kernels(library, "rms_norm"), Struct("10q2dq").pack
    fallback, float32, empty_like = add_rms_norm.OP, torch.float32, torch.empty_like

    def call(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
    ) -> tuple[Tensor, Tensor]:
        dtype, weight_dtype, shape = x.dtype, weight.dtype, x.shape
        size = shape[-1]
        kernel = by_type.get(dtype)
        if (
            kernel is None
            or residual.dtype is not dtype
            or residual.shape != shape
            or weight.shape != (size,)
            or not (weight_dtype is dtype or weight_dtype is float32)
            or not weight.is_contiguous()
        ):
            return fallback(x, residual, weight, eps, offset, round_first)
        normed = x.new_empty(*shape)
        total = empty_like(normed)
        x, x_stride = rows_of(x, size)
        residual, residual_stride = rows_of(residual, size)
        rows, is_wide = total.numel() // (size or 1), weight_dtype is float32
        inputs = x.data_ptr(), x_stride, residual.data_ptr(), residual_stride, weight.data_ptr(), is_wide
        kernel(pack(*inputs, normed.data_ptr(), total.data_ptr(), rows, size, eps, offset, round_first))
        return normed, total

    return call


def bind_silu_mul(library: ctypes.CDLL) -> Callable[..., Tensor]:
    return _bind_gated(library, "silu_mul", silu_mul.OP)


def bind_gelu_tanh_mul(library: ctypes.CDLL) -> Callable[..., Tensor]:
    return _bind_gated(library, "gelu_tanh_mul", gelu_tanh_mul.OP)


def _bind_gated(library: ctypes.CDLL, name: str, fallback: Callable[..., Tensor]) -> Callable[..., Tensor]:
    by_type, pack = kernels(library, name), Struct("7q").pack

    def call(gate: Tensor, up: Tensor) -> Tensor:
        dtype, shape = gate.dtype, gate.shape
        kernel = by_type.get(dtype)
        if kernel is None or up.dtype is not dtype or up.shape != shape:
            return fallback(gate, up)
        size = shape[-1]
        out = gate.new_empty(*shape)
        gate, gate_stride = rows_of(gate, size)
        up, up_stride = rows_of(up, size)
        rows = out.numel() // (size or 1)
        kernel(pack(gate.data_ptr(), gate_stride, up.data_ptr(), up_stride, out.data_ptr(), rows, size))
        return out

    return call


def bind_kv_write(library: ctypes.CDLL) -> Callable[..., None]:
    by_type, pack, int64 = kernels(library, "kv_write"), Struct("21q").pack, torch.int64
    fallback = kv_write.OP

    def call(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        dtype = k.dtype
        kernel = by_type.get(dtype)
        tokens, heads, k_size = k.shape
        v_size = v.shape[-1]
        blocks, block_tokens = k_cache.shape[:2]
        k_t, k_h, k_1 = k.stride()
        v_t, v_h, v_1 = v.stride()
        k_n, k_b, k_g, k_2 = k_cache.stride()
        v_n, v_b, v_g, v_2 = v_cache.stride()
        if (
            kernel is None
            or not (v.dtype is k_cache.dtype is v_cache.dtype is dtype)
            or slots.dtype is not int64
            or not slots.is_contiguous()
            or not (k_1 == v_1 == k_2 == v_2 == 1)
            or slots.shape != (tokens,)
            or v.shape != (tokens, heads, v_size)
            or k_cache.shape != (blocks, block_tokens, heads, k_size)
            or v_cache.shape != (blocks, block_tokens, heads, v_size)
        ):
            return fallback(k, v, k_cache, v_cache, slots)
        bad = kernel(
            pack(
                *(k.data_ptr(), k_t, k_h, v.data_ptr(), v_t, v_h),
                *(k_cache.data_ptr(), k_n, k_b, k_g, v_cache.data_ptr(), v_n, v_b, v_g),
                *(slots.data_ptr(), tokens, heads, k_size, v_size, blocks, block_tokens),
            )
        )
        if bad:
            _raise_bad_slot("kv_write", slots, bad - 1, blocks * block_tokens)
        return None

    return call


def _raise_bad_slot(op: str, slots: Tensor, token: int, num_slots: int) -> None:
    raise IndexError(
        f"{op}: slot {int(slots[token])} of token {token} is past the planes of {num_slots} slots"
    )


def bind_rope_kv_write(library: ctypes.CDLL) -> Callable[..., Tensor]:
    by_type, pack = kernels(library, "rope_kv_write"), Struct("37q2d2q").pack
    fallback, int64, float32 = rope_kv_write.OP, torch.int64, torch.float32

    def is_scale(scale: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        return (
            scale.shape == shape
            and (scale.dtype is dtype or scale.dtype is float32)
            and scale.stride(-1) == 1
        )

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        offset: float,
        round_first: bool,
        interleaved: bool,
    ) -> Tensor:
        dtype = q.dtype
        kernel = by_type.get(dtype)
        tokens, heads, size = q.shape
        kv_heads, v_size = v.shape[1:]
        blocks, block_tokens = k_cache.shape[:2]
        rotated = cos.shape[-1]
        q_t, q_h, q_1 = q.stride()
        k_t, k_h, k_1 = k.stride()
        v_t, v_h, v_1 = v.stride()
        k_n, k_b, k_g, k_2 = k_cache.stride()
        v_n, v_b, v_g, v_2 = v_cache.stride()
        if (
            kernel is None
            or size > MAX_HEAD
            or rotated > size
            or rotated % 2
            or not (k.dtype is v.dtype is k_cache.dtype is v_cache.dtype is dtype)
            or slots.dtype is not int64
            or not slots.is_contiguous()
            or not (q_1 == k_1 == v_1 == k_2 == v_2 == 1)
            or slots.shape != (tokens,)
            or k.shape != (tokens, kv_heads, size)
            or v.shape != (tokens, kv_heads, v_size)
            or k_cache.shape != (blocks, block_tokens, kv_heads, size)
            or v_cache.shape != (blocks, block_tokens, kv_heads, v_size)
            or not is_scale(cos, dtype, (tokens, rotated))
            or not is_scale(sin, dtype, (tokens, rotated))
            or not (q_weight is None or is_scale(q_weight, dtype, (size,)))
            or not (k_weight is None or is_scale(k_weight, dtype, (size,)))
        ):
            return fallback(
                *(q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight),
                *(eps, offset, round_first, interleaved),
            )
        out = q.new_empty(tokens, heads, size)
        bad = kernel(
            pack(
                *(q.data_ptr(), q_t, q_h, k.data_ptr(), k_t, k_h, v.data_ptr(), v_t, v_h),
                *(cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0)),
                *(k_cache.data_ptr(), k_n, k_b, k_g, v_cache.data_ptr(), v_n, v_b, v_g, slots.data_ptr()),
                0 if q_weight is None else q_weight.data_ptr(),
                0 if k_weight is None else k_weight.data_ptr(),
                *(out.data_ptr(), tokens, heads, kv_heads, size, v_size, rotated, blocks, block_tokens),
                *(cos.dtype is float32, sin.dtype is float32),
                q_weight is not None and q_weight.dtype is float32,
                k_weight is not None and k_weight.dtype is float32,
                *(eps, offset, round_first, interleaved),
            )
        )
        if bad:
            _raise_bad_slot("rope_kv_write", slots, bad - 1, blocks * block_tokens)
        return out

    return call


def bind_paged_attention(library: ctypes.CDLL) -> Callable[..., Tensor]:
    by_type, int32 = kernels(library, "paged_attention"), torch.int32
    fallback, pack = paged_attention.OP, Struct("25qdqd").pack

    def call(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        dtype = q.dtype
        kernel = by_type.get(dtype)
        tokens, heads, size = q.shape
        blocks, block_tokens, kv_heads, v_size = v_cache.shape
        seqs, width = block_tables.shape
        q_t, q_h, q_1 = q.stride()
        k_n, k_b, k_g, k_1 = k_cache.stride()
        v_n, v_b, v_g, v_1 = v_cache.stride()
        if (
            kernel is None
            or sinks is not None  # the kernel knows none
            or not (k_cache.dtype is v_cache.dtype is dtype)
            or not (block_tables.dtype is seq_lens.dtype is query_start.dtype is int32)
            or not (q_1 == k_1 == v_1 == 1)
            or block_tables.stride(1) != 1
            or not (seq_lens.is_contiguous() and query_start.is_contiguous())
            or seq_lens.shape != (seqs,)
            or query_start.shape != (seqs + 1,)
            or k_cache.shape != (blocks, block_tokens, kv_heads, size)
            or heads % kv_heads
            or window < 0
            or softcap < 0
        ):
            return fallback(
                *(q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, window, softcap, sinks)
            )
        out = q.new_empty(tokens, heads, v_size)
        error = kernel(
            pack(
                *(q.data_ptr(), q_t, q_h),
                *(k_cache.data_ptr(), k_n, k_b, k_g, v_cache.data_ptr(), v_n, v_b, v_g),
                *(block_tables.data_ptr(), block_tables.stride(0), width),
                *(seq_lens.data_ptr(), query_start.data_ptr(), out.data_ptr()),
                *(tokens, heads, kv_heads, size, v_size, seqs, blocks, block_tokens),
                *(scale, window, softcap),
            )
        )
        if error:
            raise IndexError(f"paged_attention: {ATTENTION_ERRORS[error]}")
        return out

    return call


# By the numbers in paged_attention.cpp.
ATTENTION_ERRORS = {
    1: "query_start must rise from 0 or more to at most the rows of q",
    2: "block_tables names a block that the planes do not have",
    3: "seq_lens has more tokens than block_tables has places",
}
