"""Root-mean-square norm over the last dimension: xhat * (weight + offset), xhat = x / sqrt(mean(x^2) + eps).

Shapes: x [..., D] (any leading sizes, any strides), weight [D]; the output is contiguous.
Types: x fp16, bf16, fp32 (reference also fp64); weight in x's type or float32.  The output has x's type always,
also where Python code would promote it (llama's spelling, bf16 x, float32 weight): such a graph is not this op.
Rounding: everything is float32 (float64 for fp64) and is rounded once, at the end; `round_first` also rounds xhat to
x's type before the product.  llama, qwen, mistral: round_first, offset 0.  gemma: offset 1.  olmo2, gemma4: offset 0.
Source: arXiv:1910.07467.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, check_scale_type, check_shapes, check_types


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    xhat = x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        xhat = xhat.to(x.dtype).to(wide)
    return (xhat * (weight_D.to(wide) + offset)).to(x.dtype).contiguous()


def _check(x: Tensor, weight_D: Tensor) -> None:
    check_shapes("rms_norm", x=(x, "*D"), weight=(weight_D, "D"))
    check_types("rms_norm", FLOATS, x=x)
    check_scale_type("rms_norm", "x", x, "weight", weight_D)


def _on_cpu(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    _check(x, weight_D)
    return rms_norm_reference(x, weight_D, eps, offset, round_first)


torch.library.define(
    "ostinato::rms_norm", "(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor"
)
torch.library.impl("ostinato::rms_norm", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::rms_norm")
def _fake(x: Tensor, weight_D: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    _check(x, weight_D)
    return x.new_empty(x.shape)


OP = torch.ops.ostinato.rms_norm.default
