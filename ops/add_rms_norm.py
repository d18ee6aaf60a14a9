"""sum = x + residual, and the RMS norm of the sum; each input is read once.

Shapes: x and residual [..., D] alike, weight [D]; both outputs are new and contiguous, so x and residual
may be one tensor and the sum may be used again.
Types and rounding: as rms_norm; x and residual have one type.  The sum is rounded to that type, and the
norm is of the rounded sum, as when a model adds first and norms then.
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
from ostinato.ops.rms_norm import rms_norm_reference, scaled, warps_for_row


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Return (normed, sum)."""
    total = (x + residual).contiguous()
    return rms_norm_reference(total, weight_D, eps, offset, round_first), total


@jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    x,
    residual,
    weight,
    normed,
    total,
    x_stride,
    residual_stride,
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
    kept_type = total.dtype.element_ty
    weights = tl.load(weight + at, mask=live, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    values += tl.load(residual + row * residual_stride + at, mask=live, other=0.0).to(tl.float32)
    tl.store(total + row * D + at, values.to(kept_type), mask=live)
    values = values.to(kept_type).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    tl.store(normed + row * D + at, scaled(values, rstd, weights, offset, kept_type, ROUND_FIRST), mask=live)


def _check(x: Tensor, residual: Tensor, weight_D: Tensor) -> None:
    check_shapes("add_rms_norm", x=(x, "* D"), residual=(residual, "* D"), weight=(weight_D, "D"))
    check_types("add_rms_norm", FLOATS, x=x, residual=residual)
    check_scale_type("add_rms_norm", "x", x, "weight", weight_D)


def _on_cpu(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight_D)
    return add_rms_norm_reference(x, residual, weight_D, eps, offset, round_first)


def _launch(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight_D)
    check_types("add_rms_norm", KERNEL_FLOATS, x=x)
    normed, total = x.new_empty(x.shape), x.new_empty(x.shape)
    if total.numel() == 0:
        return normed, total
    rows, residual_rows, weight_D = as_rows(x), as_rows(residual), weight_D.contiguous()
    num_rows, width = rows.shape
    block = ceil_to_power_of_2(width)
    with on_device(x):
        _kernel[(num_rows,)](
            rows,
            residual_rows,
            weight_D,
            normed,
            total,
            rows.stride(0),
            residual_rows.stride(0),
            width,
            eps,
            offset,
            ROUND_FIRST=round_first,
            BLOCK=block,
            PDL=has_pdl(x),
            num_warps=warps_for_row(block),
            launch_pdl=has_pdl(x),
        )
    return normed, total


torch.library.define(
    "ostinato::add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float offset, bool round_first) "
    "-> (Tensor, Tensor)",
)
torch.library.impl("ostinato::add_rms_norm", "CPU", _on_cpu)
torch.library.impl("ostinato::add_rms_norm", "CUDA", _launch)


@torch.library.register_fake("ostinato::add_rms_norm")
def _fake(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight_D)
    return x.new_empty(x.shape), x.new_empty(x.shape)


OP = torch.ops.ostinato.add_rms_norm.default
