"""Products of a few tokens with rows of a weight matrix: what skinny_linear and skinny_gated share.

A program owns BLOCK_R weight rows and reads each of their values once, for BLOCK_T tokens.  Few tokens are
multiplied by fused multiply-adds in float32; 8 or 16 by tensor cores, the weight being the large operand, and
each warp having columns of its own: no warp repeats the work of another, and chains of products stay short.
A norm of x costs no second pass: y = rstd(x) * sum_k (x_k * (w_k + offset)) W_nk, with the sum of squares
collected in the same loop.
Programmatic dependent launch: weights are constants (no kernel of a step writes them), so the first of them
are on their way, into registers or into L2, before the program waits for the kernel that makes x.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.launch import ceil_to_power_of_2, jit, tl

MAX_TOKENS = 16  # of these kernels


# Where the norm happens in a kernel: nowhere; its quotient after the sums; before them, in a pass of its own.
NO_NORM, NORM_LAST, NORM_FIRST = 0, 1, 2


class Config(NamedTuple):
    """How a launch splits its work."""

    by_tensor_cores: bool  # else by multiply-adds
    rows: int  # outputs of a program
    block_k: int  # columns of one step of its loop
    num_warps: int
    num_stages: int  # steps in flight (tensor cores only)
    split: int = 1  # programs that share the columns; more than one: a second kernel adds their sums
    prefetch: int = 0  # columns brought into L2 before the wait for x


def check_config(op: str, config: Config, dtype: torch.dtype, num_tokens: int) -> None:
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"{op}: {config} for {num_tokens} tokens; it takes up to {MAX_TOKENS}")
    if config.by_tensor_cores and dtype == torch.float32:
        raise ValueError(f"{op}: {config} for float32, which tensor cores would round; use multiply-adds")
    if config.split > 1 and not config.by_tensor_cores:
        raise ValueError(f"{op}: {config}: only the tensor core kernel splits columns; use split=1")


def token_block(num_tokens: int, config: Config) -> int:
    """Tokens of a program, the kernels' BLOCK_T."""
    if config.by_tensor_cores:
        return 8 if num_tokens <= 8 else 16
    return min(ceil_to_power_of_2(num_tokens), 8)


def grid(num_tokens: int, num_out: int, config: Config) -> tuple[int, int]:
    """Blocks of outputs; parts of the columns, or blocks of tokens for multiply-adds."""
    blocks = -(-num_out // config.rows)
    if config.by_tensor_cores:
        return blocks, config.split
    return blocks, -(-num_tokens // token_block(num_tokens, config))


def row_stride(rows: Tensor, num_tokens: int) -> int:
    """Stride of [T, .] rows; the stride of a lone row means nothing and shall not make a variant."""
    return rows.stride(0) if num_tokens > 1 else rows.shape[1]


def norm_stage(norm_weight: Tensor | None, x: Tensor, config: Config) -> int:
    """The kernels' NORM. fp16 is normed before tensor cores take it: x * weight alone could overflow."""
    if norm_weight is None:
        return NO_NORM
    return NORM_FIRST if config.by_tensor_cores and x.dtype == torch.float16 else NORM_LAST


def check_dense_rows(op: str, weight: Tensor) -> None:
    """A weight is never copied in a step, so the kernels want rows whose values lie side by side."""
    if weight.stride(-1) != 1 and weight.numel():
        raise ValueError(f"{op}: weight has strides {weight.stride()}; the last one must be 1 on a GPU")


@jit
def _prefetch(at, first, stop, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Ask L2 for columns first to first + COUNT, stop at most, of the rows at `at`: one request a line."""
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth  # values in 128 bytes
    column = tl.minimum(first + tl.arange(0, COUNT // LINE) * LINE, stop - 1)
    address = (at[:, None] + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def sums_of_rows(  # type: ignore[no-untyped-def]  # Triton
    x,
    at,
    norm_weight,
    token,
    num_tokens,
    first,
    x_stride,
    eps,
    offset,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [BLOCK_R, BLOCK_T] of the rows at `at` with tokens, and the sum of squares of each token's part.

    Over columns first to first + COLUMNS (over all, without tensor cores). With NORM 1 the caller norms them,
    once it has the squares of all columns.
    """
    x_at = x + token.to(tl.int64) * x_stride
    there = token < num_tokens
    if DOT:
        sums, squares = _by_tensor_cores(
            x_at,
            at,
            norm_weight,
            there,
            first,
            eps,
            offset,
            K,
            COLUMNS,
            BLOCK_R,
            BLOCK_K,
            BLOCK_T,
            WARPS,
            PREFETCH,
            NORM,
            FLOAT32_DOT,
            PDL,
        )
    else:
        sums, squares = _by_multiply_adds(
            x_at, at, norm_weight, there, offset, K, BLOCK_R, BLOCK_K, BLOCK_T, PREFETCH, NORM, PDL
        )
    return sums, squares


@jit
def _by_multiply_adds(  # type: ignore[no-untyped-def]  # Triton
    x_at,
    at,
    norm_weight,
    there,
    offset,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread holds 8 columns side by side and adds them at once, which takes few registers."""
    EIGHTS: tl.constexpr = BLOCK_K // 8
    k = tl.arange(0, BLOCK_K)[None, None, :]
    rows_at = at[:, None, None]
    ahead = tl.load(rows_at + k, mask=k < K, other=0.0, eviction_policy="evict_first")
    if PDL:
        if PREFETCH > 0:
            _prefetch(at, BLOCK_K, K, PREFETCH)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_R, BLOCK_T, EIGHTS], tl.float32)
    squares = tl.zeros([1, BLOCK_T, EIGHTS], tl.float32)
    for start in range(0, K, BLOCK_K):
        w = ahead.to(tl.float32)
        column = start + k
        next_column = column + BLOCK_K
        ahead = tl.load(rows_at + next_column, mask=next_column < K, other=0.0, eviction_policy="evict_first")
        live = column < K
        values = tl.load(x_at[None, :, None] + column, mask=there[None, :, None] & live, other=0.0)
        values = values.to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(values * values, (1, BLOCK_T, EIGHTS, 8)), 3)
            scale = tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
            values = values * (scale + offset)
        sums += tl.sum(tl.reshape(w * values, (BLOCK_R, BLOCK_T, EIGHTS, 8)), 3)
    return tl.sum(sums, 2), tl.sum(tl.sum(squares, 2), 0)


@jit
def _by_tensor_cores(  # type: ignore[no-untyped-def]  # Triton
    x_at,
    at,
    norm_weight,
    there,
    first,
    eps,
    offset,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and PREFETCH > 0:
        _prefetch(at, first, K, PREFETCH)
    SHARE: tl.constexpr = BLOCK_K // WARPS  # columns of a warp in a step
    k = (tl.arange(0, WARPS)[:, None] * SHARE + tl.arange(0, SHARE)[None, :])[:, None, :]
    if NORM:  # too small for the loop's asynchronous copies, so a step ahead in registers
        scale_ahead = tl.load(norm_weight + first + k, mask=first + k < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tokens_at, there = x_at[None, :, None], there[None, :, None]
    if NORM == 2:
        squares = tl.zeros([WARPS, BLOCK_T, SHARE // 8], tl.float32)
        for start in range(0, K, BLOCK_K):
            column = start + k
            wide = tl.load(tokens_at + column, mask=there & (column < K), other=0.0).to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (WARPS, BLOCK_T, SHARE // 8, 8)), 3)
        rstd = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + eps)
    sums = tl.zeros([WARPS, BLOCK_R, BLOCK_T], tl.float32)
    squares = tl.zeros([WARPS, BLOCK_T, SHARE // 8], tl.float32)
    for start in tl.range(first, first + COLUMNS, BLOCK_K):
        column = start + k
        live = column < K
        w = tl.load(at[None, :, None] + column, mask=live, other=0.0, eviction_policy="evict_first")
        values = tl.load(tokens_at + column, mask=there & live, other=0.0)
        if NORM:
            scale = scale_ahead.to(tl.float32) + offset
            next_column = column + BLOCK_K
            scale_ahead = tl.load(norm_weight + next_column, mask=next_column < K, other=0.0)
            wide = values.to(tl.float32)
            if NORM == 2:
                wide = wide * rstd[None, :, None]
            else:
                squares += tl.sum(tl.reshape(wide * wide, (WARPS, BLOCK_T, SHARE // 8, 8)), 3)
            values = (wide * scale).to(x_at.dtype.element_ty)
        if FLOAT32_DOT:
            w, values = w.to(tl.float32), values.to(tl.float32)
        sums = tl.dot(w, tl.permute(values, (0, 2, 1)), sums)
    return tl.sum(sums, 0), tl.sum(tl.sum(squares, 2), 0)
