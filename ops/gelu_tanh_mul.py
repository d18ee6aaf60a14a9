"""gelu(gate) * up, gelu by its tanh formula, reading each input once.

Shapes: gate and up [..., F] alike, any strides (halves of one merged tensor are welcome); the output is
contiguous.
Types: fp16, bf16, fp32 (reference also fp64); both inputs alike.
Rounding: gelu is rounded to the input type before the product.  Source: arXiv:1606.08415, arXiv:2002.05202.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.check import FLOATS, check_shapes, check_types
from ostinato.ops.launch import KERNEL_FLOATS, as_rows, has_pdl, jit, on_device, tl

BLOCK = 1024  # values of one program


def gelu_tanh_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.gelu(gate, approximate="tanh") * up).contiguous()


@jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    gate, up, out, gate_stride, up_stride, F, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < F
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    g = tl.load(gate + row * gate_stride + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, mask=live, other=0.0).to(tl.float32)
    # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
    gelu = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))  # 2 * sqrt(2 / pi)
    tl.store(out + row * F + at, gelu.to(out.dtype.element_ty).to(tl.float32) * u, mask=live)


def _check(gate: Tensor, up: Tensor) -> None:
    check_shapes("gelu_tanh_mul", gate=(gate, "* F"), up=(up, "* F"))
    check_types("gelu_tanh_mul", FLOATS, gate=gate, up=up)


def _on_cpu(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return gelu_tanh_mul_reference(gate, up)


def _launch(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    check_types("gelu_tanh_mul", KERNEL_FLOATS, gate=gate)
    out = gate.new_empty(gate.shape)
    if out.numel() == 0:
        return out
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    num_rows, width = gate_rows.shape
    with on_device(out):
        _kernel[num_rows, -(-width // BLOCK)](
            gate_rows,
            up_rows,
            out,
            gate_rows.stride(0),
            up_rows.stride(0),
            width,
            BLOCK=BLOCK,
            PDL=has_pdl(out),
            launch_pdl=has_pdl(out),
        )
    return out


torch.library.define("ostinato::gelu_tanh_mul", "(Tensor gate, Tensor up) -> Tensor")
torch.library.impl("ostinato::gelu_tanh_mul", "CPU", _on_cpu)
torch.library.impl("ostinato::gelu_tanh_mul", "CUDA", _launch)


@torch.library.register_fake("ostinato::gelu_tanh_mul")
def _fake(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return gate.new_empty(gate.shape)


OP = torch.ops.ostinato.gelu_tanh_mul.default
