"""silu(gate) * up, reading each input once.

Shapes: gate and up [..., F] alike, any strides (halves of one merged tensor are welcome); the output is contiguous.
Types: fp16, bf16, fp32 (reference also fp64); both inputs alike.
Rounding: silu is rounded to the input type before the product.  Source: arXiv:2002.05202.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.check import FLOATS, check_shapes, check_types


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate) * up).contiguous()


def _check(gate: Tensor, up: Tensor) -> None:
    check_shapes("silu_mul", gate=(gate, "*F"), up=(up, "*F"))
    check_types("silu_mul", FLOATS, gate=gate, up=up)


def _on_cpu(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return silu_mul_reference(gate, up)


torch.library.define("ostinato::silu_mul", "(Tensor gate, Tensor up) -> Tensor")
torch.library.impl("ostinato::silu_mul", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::silu_mul")
def _fake(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return gate.new_empty(gate.shape)


OP = torch.ops.ostinato.silu_mul.default
