"""y = act(gate) * up for the few tokens of a decode step, (gate, up) = norm(x) W^T, reading each weight once.

Shapes: x [..., K] (T tokens, any strides), weight [2F, K] with dense rows, those of the gate first,
norm_weight [K]; y [..., F] is contiguous.  norm is rms_norm over K with `eps`, `offset` and `round_first` and
may be missing; act is "silu" or "gelu_tanh".
Types: fp16, bf16, fp32 (reference also fp64), one for all but norm_weight, which may be float32.
Rounding: the reference rounds where rms_norm, F.linear and silu_mul or gelu_tanh_mul do.  The kernel here,
for 1 to 16 tokens, computes in float32 and rounds once, at the end; its tensor cores get a rounded
x * (norm_weight + offset).  Tiles (wgmma_linear, up to 256 tokens) take a rounded norm and round once more,
at the end.  More tokens go through the parts.  `skinny_ways` chooses.
Tokens of one launch do not depend on each other, and sums have one order: results are deterministic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops import gelu_tanh_mul, rms_norm, silu_mul, tuning, wgmma_linear
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

PRODUCTS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}  # activation: the op of gate and up
# What the tuner tries; an output is two rows of weights. See skinny_linear on what decides.
CANDIDATES = (
    Config(False, 1, 1024, 4, 1),
    Config(False, 1, 1024, 4, 1, prefetch=1024),
    Config(False, 1, 1024, 4, 1, prefetch=2048),
    Config(False, 2, 512, 2, 1),
    Config(False, 2, 1024, 4, 1),
    Config(False, 2, 1024, 4, 1, prefetch=1024),
    Config(False, 4, 1024, 4, 1),
    Config(True, 8, 128, 4, 6, prefetch=256),
    Config(True, 8, 256, 4, 4),
    Config(True, 8, 256, 4, 4, prefetch=512),
    Config(True, 16, 256, 4, 4),
    Config(True, 16, 256, 4, 4, prefetch=512),
    Config(True, 16, 256, 8, 4, prefetch=512),
    Config(True, 32, 128, 4, 4),
    Config(True, 32, 128, 4, 4, prefetch=512),
)


def skinny_gated_reference(
    x: Tensor,
    weight_GK: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    activation: str,
) -> Tensor:
    if norm_weight_K is not None:
        x = rms_norm.rms_norm_reference(x, norm_weight_K, eps, offset, round_first)
    gate, up = F.linear(x, weight_GK).chunk(2, -1)
    if activation == "silu":
        return silu_mul.silu_mul_reference(gate, up)
    return gelu_tanh_mul.gelu_tanh_mul_reference(gate, up)


@jit
def _gated(gate, up, SILU: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    if SILU:
        return gate * tl.sigmoid(gate) * up
    # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@jit(do_not_specialize=["num_tokens"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    x,
    weight,
    norm_weight,
    out,
    num_tokens,
    F,
    x_stride,
    weight_stride,
    eps,
    offset,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    DOT: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_R outputs of BLOCK_T tokens: a row of the gate and a row of up for each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    each = tl.program_id(0) * BLOCK_R * 2 + tl.arange(0, 2 * BLOCK_R)
    row = tl.minimum(each // 2, F - 1) + each % 2 * F  # of the gate and of up in turn
    token = tl.arange(0, BLOCK_T)
    if not DOT:
        token += tl.program_id(1) * BLOCK_T
    sums, squares = sums_of_rows(
        x,
        weight + row.to(tl.int64) * weight_stride,
        norm_weight,
        token,
        num_tokens,
        0,
        x_stride,
        eps,
        offset,
        K,
        K,
        2 * BLOCK_R,
        BLOCK_K,
        BLOCK_T,
        WARPS,
        PREFETCH,
        NORM,
        DOT,
        FLOAT32_DOT,
        PDL,
    )
    if NORM == 1:
        sums *= tl.rsqrt(squares / K + eps)[None, :]
    gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_R, 2, BLOCK_T)), (0, 2, 1)))
    y = _gated(gate, up, SILU).to(out.dtype.element_ty)
    column = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = (column < F)[:, None] & (token < num_tokens)[None, :]
    tl.store(out + token.to(tl.int64)[None, :] * F + column[:, None], y, mask=there)


def _check(x: Tensor, weight_GK: Tensor, norm_weight_K: Tensor | None, activation: str) -> None:
    op = "skinny_gated"
    if activation not in PRODUCTS:
        raise ValueError(f"{op}: activation={activation!r}; it must be one of {', '.join(PRODUCTS)}")
    shapes = {"x": (x, "* K"), "weight": (weight_GK, "G K")}
    if norm_weight_K is not None:
        shapes["norm_weight"] = norm_weight_K, "K"
        check_scale_type(op, "x", x, "norm_weight", norm_weight_K)
    check_shapes(op, **shapes)
    check_types(op, FLOATS, x=x, weight=weight_GK)
    if weight_GK.shape[0] % 2:
        raise ValueError(
            f"{op}: weight has {weight_GK.shape[0]} rows; they must be even, half gate and half up"
        )


def _on_cpu(
    x: Tensor,
    weight_GK: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    activation: str,
) -> Tensor:
    _check(x, weight_GK, norm_weight_K, activation)
    return skinny_gated_reference(x, weight_GK, norm_weight_K, eps, offset, round_first, activation)


def _launch(
    x: Tensor,
    weight_GK: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    activation: str,
    *,
    choices: tuning.Choices | None = None,
) -> Tensor:
    return launch(x, weight_GK, norm_weight_K, eps, offset, round_first, activation, choices=choices)


def launch(
    x: Tensor,
    weight_GK: Tensor,
    norm_weight_K: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    round_first: bool = False,
    activation: str = "silu",
    *,
    config: Way = None,
    choices: tuning.Choices | None = None,
) -> Tensor:
    """The op on a GPU; `config` overrides the choice of a way, `choices` the GPU's table."""
    _check(x, weight_GK, norm_weight_K, activation)
    check_types("skinny_gated", KERNEL_FLOATS, x=x)
    check_dense_rows("skinny_gated", weight_GK)
    num_rows, width = weight_GK.shape
    num_out = num_rows // 2
    out = x.new_empty((*x.shape[:-1], num_out))
    if out.numel() == 0:
        return out
    num_tokens = out.numel() // num_out
    way: Way = config
    if config is None and width:
        way = chosen_way("skinny_gated", as_rows(x), weight_GK, activation, choices, _config)
    if norm_weight_K is not None and not isinstance(way, Config):
        x = rms_norm.OP(x, norm_weight_K, eps, offset, round_first)
    if way is None:
        return PRODUCTS[activation].OP(*F.linear(x, weight_GK).chunk(2, -1))
    if isinstance(way, Tile):
        with on_device(x):
            flat = out.view(num_tokens, num_out)
            wgmma_linear.launch(as_rows(x), weight_GK, flat, way, activation=activation)
        return out
    config = way
    check_config("skinny_gated", config, x.dtype, num_tokens)
    rows, pdl = as_rows(x), has_pdl(x)
    with on_device(x):
        _kernel[grid(num_tokens, num_out, config)](
            rows,
            weight_GK,
            # any tensor stands for what is missing: it is not read
            weight_GK if norm_weight_K is None else norm_weight_K.contiguous(),
            out,
            num_tokens,
            num_out,
            row_stride(rows, num_tokens),
            weight_GK.stride(0),
            eps,
            offset,
            K=width,
            BLOCK_R=config.rows,
            BLOCK_K=config.block_k,
            BLOCK_T=token_block(num_tokens, config),
            WARPS=config.num_warps,
            PREFETCH=config.prefetch,
            NORM=norm_stage(norm_weight_K, x, config),
            SILU=activation == "silu",
            DOT=config.by_tensor_cores,
            FLOAT32_DOT=not x.is_cuda,  # the interpreter's dot takes bf16 for integers
            PDL=pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            launch_pdl=pdl,
        )
    return out


def _config(num_tokens: int, num_out: int, width: int, dtype: torch.dtype) -> Config:
    """Chosen by reasoning, where nothing was measured: every multiprocessor has weights on their way."""
    if num_tokens <= 4 or dtype == torch.float32:  # 1024 programs: most are there at once
        rows = 2 if num_out >= 2048 else 1
        return Config(False, rows, 512 if width <= 512 else 1024, 2 if width <= 512 else 4, 1)
    if num_out < 16 * 128:  # less than a program for each multiprocessor
        return Config(True, 8, 256, 4, 4, prefetch=512)
    if num_tokens <= 8:
        return Config(True, 16, 256, 4, 4, prefetch=512)
    return Config(True, 32, 128, 4, 4, prefetch=512)


torch.library.define(
    "ostinato::skinny_gated",
    "(Tensor x, Tensor weight, Tensor? norm_weight, float eps, float offset, bool round_first, "
    "str activation) -> Tensor",
)
torch.library.impl("ostinato::skinny_gated", "CPU", _on_cpu)
torch.library.impl("ostinato::skinny_gated", "CUDA", _launch)


@torch.library.register_fake("ostinato::skinny_gated")
def _fake(
    x: Tensor,
    weight_GK: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    activation: str,
) -> Tensor:
    _check(x, weight_GK, norm_weight_K, activation)
    return x.new_empty((*x.shape[:-1], weight_GK.shape[0] // 2))


OP = torch.ops.ostinato.skinny_gated.default
