"""sum = x + residual, and the RMS norm of the sum; each input is read once.

Shapes: x and residual [..., D] alike, weight [D]; both outputs are new and contiguous, so x and residual may be one
tensor and the sum may be used again.
Types and rounding: as rms_norm; x and residual have one type.  The sum is rounded to that type, and the norm is of the
rounded sum, as when a model adds first and norms then.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, check_scale_type, check_shapes, check_types
from ostinato.ops.rms_norm import rms_norm_reference


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Return (normed, sum)."""
    total = (x + residual).contiguous()
    return rms_norm_reference(total, weight_D, eps, offset, round_first), total


def _check(x: Tensor, residual: Tensor, weight_D: Tensor) -> None:
    check_shapes("add_rms_norm", x=(x, "*D"), residual=(residual, "*D"), weight=(weight_D, "D"))
    check_types("add_rms_norm", FLOATS, x=x, residual=residual)
    check_scale_type("add_rms_norm", "x", x, "weight", weight_D)


def _on_cpu(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight_D)
    return add_rms_norm_reference(x, residual, weight_D, eps, offset, round_first)


torch.library.define(
    "ostinato::add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float offset, bool round_first) -> (Tensor, Tensor)",
)
torch.library.impl("ostinato::add_rms_norm", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::add_rms_norm")
def _fake(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight_D)
    return x.new_empty(x.shape), x.new_empty(x.shape)


OP = torch.ops.ostinato.add_rms_norm.default
