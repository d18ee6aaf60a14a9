"""gelu(gate) * up, gelu by its tanh formula, reading each input once.

Shapes: gate and up [..., F] alike, any strides (halves of one merged tensor are welcome); the output is contiguous.
Types: fp16, bf16, fp32 (reference also fp64); both inputs alike.
Rounding: gelu is rounded to the input type before the product.  Source: arXiv:1606.08415, arXiv:2002.05202.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.check import FLOATS, check_shapes, check_types


def gelu_tanh_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.gelu(gate, approximate="tanh") * up).contiguous()


def _check(gate: Tensor, up: Tensor) -> None:
    check_shapes("gelu_tanh_mul", gate=(gate, "*F"), up=(up, "*F"))
    check_types("gelu_tanh_mul", FLOATS, gate=gate, up=up)


def _on_cpu(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return gelu_tanh_mul_reference(gate, up)


torch.library.define("ostinato::gelu_tanh_mul", "(Tensor gate, Tensor up) -> Tensor")
torch.library.impl("ostinato::gelu_tanh_mul", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::gelu_tanh_mul")
def _fake(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return gate.new_empty(gate.shape)


OP = torch.ops.ostinato.gelu_tanh_mul.default
