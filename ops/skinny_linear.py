"""y = norm(x) W^T + bias + residual for the few tokens of a decode step, reading each weight once.

Shapes: x [..., K] (T tokens, any strides), weight [N, K] with dense rows, bias [N], norm_weight [K],
residual [..., N]; the output is contiguous.  norm is rms_norm over K with `eps`, `offset` and `round_first`;
norm_weight, bias and residual may each be missing.
Types: fp16, bf16, fp32 (reference also fp64), one for all but norm_weight, which may be float32.
Rounding: the reference rounds where rms_norm, F.linear and an addition do.  The kernel here, for 1 to 16
tokens, sums in float32 and rounds once, at the end; its tensor cores get a rounded
x * (norm_weight + offset).  Tiles (wgmma_linear, up to 256 tokens) take a rounded norm and round once more,
at the end.  More tokens go through the parts.  `skinny_ways` chooses.
Tokens of one launch do not depend on each other, and sums have one order: results are deterministic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops import rms_norm, tuning, wgmma_linear
from ostinato.ops.check import FLOATS, check_scale_type, check_shapes, check_types
from ostinato.ops.launch import KERNEL_FLOATS, as_rows, has_pdl, jit, on_device, tl
from ostinato.ops.skinny_rows import (
    Config,
    check_config,
    check_dense_rows,
    grid,
    norm_stage,
    row_stride,
    sums_of_rows,
    token_block,
)
from ostinato.ops.skinny_ways import Way, chosen_way
from ostinato.ops.wgmma_linear import Tile

# What the tuner tries. Weights in flight decide: 4.4 TB/s times a delay near 0.8 us is 27 KiB on each of the
# H200's 132 multiprocessors, and these have 50 to 220 KiB. On sm_90 each compiles without spills.
CANDIDATES = (
    Config(False, 1, 1024, 4, 1),
    Config(False, 1, 1024, 4, 1, prefetch=2048),
    Config(False, 2, 1024, 4, 1),
    Config(False, 2, 1024, 4, 1, prefetch=1024),
    Config(False, 2, 1024, 4, 1, prefetch=2048),
    Config(False, 4, 512, 2, 1),
    Config(False, 4, 512, 2, 1, prefetch=512),
    Config(False, 4, 1024, 4, 1),
    Config(False, 4, 1024, 4, 1, prefetch=1024),
    Config(False, 8, 1024, 4, 1),
    Config(True, 16, 128, 4, 6, prefetch=256),
    Config(True, 16, 256, 4, 4),
    Config(True, 16, 256, 4, 4, prefetch=512),
    Config(True, 32, 256, 4, 4),
    Config(True, 32, 256, 4, 4, prefetch=512),
    Config(True, 32, 256, 8, 4, prefetch=512),
    Config(True, 64, 128, 4, 4, prefetch=512),
    Config(True, 32, 256, 4, 4, split=2, prefetch=512),
    Config(True, 64, 128, 4, 4, split=2, prefetch=512),
)
SUM_BLOCK = 256  # outputs of one program of the second kernel of a split


def skinny_linear_reference(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    residual: Tensor | None,
) -> Tensor:
    if norm_weight_K is not None:
        x = rms_norm.rms_norm_reference(x, norm_weight_K, eps, offset, round_first)
    y = F.linear(x, weight_NK, bias_N)
    return (y if residual is None else y + residual).contiguous()


@jit(do_not_specialize=["num_tokens"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    parts,
    num_tokens,
    N,
    x_stride,
    weight_stride,
    residual_stride,
    eps,
    offset,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DOT: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_R outputs of BLOCK_T tokens; the sums of a part of the columns where SPLIT > 1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.arange(0, BLOCK_T)
    COLUMNS: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    first = 0
    if SPLIT > 1:
        first = tl.program_id(1) * COLUMNS
    if not DOT:
        token += tl.program_id(1) * BLOCK_T
    y, squares = sums_of_rows(
        x,
        weight + tl.minimum(row, N - 1).to(tl.int64) * weight_stride,
        norm_weight,
        token,
        num_tokens,
        first,
        x_stride,
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
        DOT,
        FLOAT32_DOT,
        PDL,
    )
    there = (row < N)[:, None] & (token < num_tokens)[None, :]
    token_64 = token.to(tl.int64)
    if SPLIT == 1:
        if NORM == 1:
            y *= tl.rsqrt(squares / K + eps)[None, :]
        if BIAS:
            y += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            residual_at = residual + token_64[None, :] * residual_stride + row[:, None]
            y += tl.load(residual_at, mask=there, other=0.0).to(tl.float32)
        tl.store(out + token_64[None, :] * N + row[:, None], y.to(out.dtype.element_ty), mask=there)
    else:
        part_token = tl.program_id(1) * num_tokens + token_64
        tl.store(parts + part_token[None, :] * N + row[:, None], y, mask=there)
        if NORM == 1 and tl.program_id(0) == 0:
            squares_at = parts + (SPLIT * num_tokens).to(tl.int64) * N
            tl.store(squares_at + part_token, squares, mask=token < num_tokens)


@jit(do_not_specialize=["num_tokens"])
def _add_parts(  # type: ignore[no-untyped-def]  # Triton
    parts,
    bias,
    residual,
    out,
    num_tokens,
    N,
    residual_stride,
    eps,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Outputs of one token from the sums of all parts of the columns, added in their order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, there = tl.program_id(1).to(tl.int64), row < N
    y = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        y += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        sums += tl.load(parts + (part * num_tokens + token) * N + row, mask=there, other=0.0)
    if NORM == 1:
        squares_at = parts + (SPLIT * num_tokens).to(tl.int64) * N + token
        squares = tl.load(squares_at)
        for part in tl.static_range(1, SPLIT):
            squares += tl.load(squares_at + part * num_tokens)
        sums *= tl.rsqrt(squares / K + eps)
    y += sums
    if RESIDUAL:
        y += tl.load(residual + token * residual_stride + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * N + row, y.to(out.dtype.element_ty), mask=there)


def _check(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_weight_K: Tensor | None,
    residual: Tensor | None,
) -> None:
    op = "skinny_linear"
    alike = {"x": x, "weight": weight_NK}
    shapes = {"x": (x, "* K"), "weight": (weight_NK, "N K")}
    if bias_N is not None:
        alike["bias"], shapes["bias"] = bias_N, (bias_N, "N")
    if norm_weight_K is not None:
        shapes["norm_weight"] = norm_weight_K, "K"
        check_scale_type(op, "x", x, "norm_weight", norm_weight_K)
    if residual is not None:
        alike["residual"], shapes["residual"] = residual, (residual, "* N")
    check_shapes(op, **shapes)
    check_types(op, FLOATS, **alike)


def _on_cpu(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    residual: Tensor | None,
) -> Tensor:
    _check(x, weight_NK, bias_N, norm_weight_K, residual)
    return skinny_linear_reference(x, weight_NK, bias_N, norm_weight_K, eps, offset, round_first, residual)


def _launch(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    residual: Tensor | None,
    *,
    choices: tuning.Choices | None = None,
) -> Tensor:
    return launch(x, weight_NK, bias_N, norm_weight_K, eps, offset, round_first, residual, choices=choices)


def launch(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    norm_weight_K: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    round_first: bool = False,
    residual: Tensor | None = None,
    *,
    config: Way = None,
    choices: tuning.Choices | None = None,
) -> Tensor:
    """The op on a GPU; `config` overrides the choice of a way, `choices` the GPU's table."""
    _check(x, weight_NK, bias_N, norm_weight_K, residual)
    check_types("skinny_linear", KERNEL_FLOATS, x=x)
    check_dense_rows("skinny_linear", weight_NK)
    num_out, width = weight_NK.shape
    out = x.new_empty((*x.shape[:-1], num_out))
    if out.numel() == 0:
        return out
    num_tokens = out.numel() // num_out
    way: Way = config
    if config is None and width:
        way = chosen_way("skinny_linear", as_rows(x), weight_NK, "", choices, _config)
    if norm_weight_K is not None and not isinstance(way, Config):
        x = rms_norm.OP(x, norm_weight_K, eps, offset, round_first)
    if way is None:
        y = F.linear(x, weight_NK, bias_N)
        return y if residual is None else y + residual
    if isinstance(way, Tile):
        with on_device(x):
            wgmma_linear.launch(
                as_rows(x),
                weight_NK,
                out.view(num_tokens, num_out),
                way,
                bias_N=bias_N,
                residual_TN=None if residual is None else as_rows(residual),
            )
        return out
    config = way
    check_config("skinny_linear", config, x.dtype, num_tokens)
    rows = as_rows(x)
    norm, pdl = norm_stage(norm_weight_K, x, config), has_pdl(x)
    parts = out
    if config.split > 1:  # the sums of every part, then each part's sums of squares
        parts = x.new_empty(config.split * num_tokens * (num_out + 1), dtype=torch.float32)
    # any tensor stands for what is missing: it is not read
    bias = out if bias_N is None else bias_N.contiguous()
    added = out if residual is None else as_rows(residual)
    added_stride = num_out if residual is None else row_stride(added, num_tokens)
    with on_device(x):
        _kernel[grid(num_tokens, num_out, config)](
            rows,
            weight_NK,
            bias,
            weight_NK if norm_weight_K is None else norm_weight_K.contiguous(),
            added,
            out,
            parts,
            num_tokens,
            num_out,
            row_stride(rows, num_tokens),
            weight_NK.stride(0),
            added_stride,
            eps,
            offset,
            K=width,
            BLOCK_R=config.rows,
            BLOCK_K=config.block_k,
            BLOCK_T=token_block(num_tokens, config),
            WARPS=config.num_warps,
            SPLIT=config.split,
            PREFETCH=config.prefetch,
            BIAS=bias_N is not None,
            NORM=norm,
            RESIDUAL=residual is not None,
            DOT=config.by_tensor_cores,
            FLOAT32_DOT=not x.is_cuda,  # the interpreter's dot takes bf16 for integers
            PDL=pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            launch_pdl=pdl,
        )
        if config.split > 1:
            _add_parts[-(-num_out // SUM_BLOCK), num_tokens](
                parts,
                bias,
                added,
                out,
                num_tokens,
                num_out,
                added_stride,
                eps,
                K=width,
                SPLIT=config.split,
                BLOCK=SUM_BLOCK,
                BIAS=bias_N is not None,
                NORM=norm,
                RESIDUAL=residual is not None,
                PDL=pdl,
                num_warps=2,
                launch_pdl=pdl,
            )
    return out


def _config(num_tokens: int, num_out: int, width: int, dtype: torch.dtype) -> Config:
    """Chosen by reasoning, where nothing was measured: every multiprocessor has weights on their way."""
    if num_tokens <= 4 or dtype == torch.float32:  # 1024 programs: most are there at once
        rows = next((rows for rows in (2, 4)[num_tokens > 1 :] if num_out >= 1024 * rows), 1)
        return Config(False, rows, 512 if width <= 512 else 1024, 2 if width <= 512 else 4, 1)
    if num_out < 32 * 128:  # less than a program for each multiprocessor
        return Config(True, 16, 256, 4, 4, prefetch=512)
    if num_tokens <= 8:
        return Config(True, 32, 256, 4, 4, prefetch=512)
    # Each program reads all of x: at 16 tokens that is half as much as 32 rows of weights.
    return Config(True, 64, 128, 4, 4, split=1 if num_out >= 64 * 128 else 2, prefetch=512)


torch.library.define(
    "ostinato::skinny_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, float offset, "
    "bool round_first, Tensor? residual) -> Tensor",
)
torch.library.impl("ostinato::skinny_linear", "CPU", _on_cpu)
torch.library.impl("ostinato::skinny_linear", "CUDA", _launch)


@torch.library.register_fake("ostinato::skinny_linear")
def _fake(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    residual: Tensor | None,
) -> Tensor:
    _check(x, weight_NK, bias_N, norm_weight_K, residual)
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


OP = torch.ops.ostinato.skinny_linear.default
