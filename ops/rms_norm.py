"""Root-mean-square norm over the last dimension: x / sqrt(mean(x^2) + eps) * (weight + offset).

Shapes: x [..., D] (any leading sizes, any strides), weight [D]; the output is contiguous.
Types: x fp16, bf16, fp32 (reference also fp64); weight in x's type or float32.  The output has x's type
always, also where Python code would promote it (llama's spelling, bf16 x, float32 weight): such a graph is
not this op.
Rounding: everything is float32 (float64 for fp64) and is rounded once, at the end; `round_first` also rounds
the quotient to x's type before the product.  llama, qwen, mistral: round_first, offset 0.  gemma: offset 1.
olmo2, gemma4: offset 0.
Source: arXiv:1910.07467.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, check_scale_type, check_shapes, check_types
from ostinato.ops.launch import (
    KERNEL_FLOATS,
    as_rows,
    ceil_to_power_of_2,
    has_pdl,
    jit,
    on_device,
    tl,
)


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    xhat = x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        xhat = xhat.to(x.dtype).to(wide)
    return (xhat * (weight_D.to(wide) + offset)).to(x.dtype).contiguous()


@jit
def scaled(x, rstd, weight, offset, kept_type: tl.constexpr, ROUND_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """float32 x * rstd * (weight + offset), rounded as the reference rounds; also for other kernels."""
    xhat = x * rstd
    if ROUND_FIRST:
        xhat = xhat.to(kept_type).to(tl.float32)
    return (xhat * (weight.to(tl.float32) + offset)).to(kept_type)


@jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    x,
    weight,
    out,
    x_stride,
    D,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < D
    weights = tl.load(weight + at, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    tl.store(
        out + row * D + at,
        scaled(values, rstd, weights, offset, out.dtype.element_ty, ROUND_FIRST),
        mask=live,
    )


def _check(x: Tensor, weight_D: Tensor) -> None:
    check_shapes("rms_norm", x=(x, "* D"), weight=(weight_D, "D"))
    check_types("rms_norm", FLOATS, x=x)
    check_scale_type("rms_norm", "x", x, "weight", weight_D)


def _on_cpu(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    _check(x, weight_D)
    return rms_norm_reference(x, weight_D, eps, offset, round_first)


def _launch(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    _check(x, weight_D)
    check_types("rms_norm", KERNEL_FLOATS, x=x)
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    rows, weight_D = as_rows(x), weight_D.contiguous()
    num_rows, width = rows.shape
    block = ceil_to_power_of_2(width)  # a whole row is kept in registers
    with on_device(x):
        _kernel[(num_rows,)](
            rows,
            weight_D,
            out,
            rows.stride(0),
            width,
            eps,
            offset,
            ROUND_FIRST=round_first,
            BLOCK=block,
            PDL=has_pdl(x),
            num_warps=warps_for_row(block),
            launch_pdl=has_pdl(x),
        )
    return out


def warps_for_row(block: int) -> int:
    """Warps of a program that reduces one row: up to 16 values a thread, then longer threads."""
    return min(max(block // 512, 1), 16)


torch.library.define(
    "ostinato::rms_norm", "(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor"
)
torch.library.impl("ostinato::rms_norm", "CPU", _on_cpu)
torch.library.impl("ostinato::rms_norm", "CUDA", _launch)


@torch.library.register_fake("ostinato::rms_norm")
def _fake(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    _check(x, weight_D)
    return x.new_empty(x.shape)


OP = torch.ops.ostinato.rms_norm.default
