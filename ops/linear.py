"""y = x W^T + bias for few rows: the native kernel reads each weight once, at memory speed.

Shapes: x [..., K], weight [N, K], bias [N] -> [..., N].  Types: float32, bfloat16 (sums in float32).
The graph keeps aten.linear; this is what a program calls in its place. Anything else than a few rows of
a dense matrix of these types goes to torch, which is as good or better there.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear as linear_reference

# Most rows for which the native kernel is used, by type (measured, see benchmarks/cpu_ops.py).
MAX_ROWS = {torch.float32: 32, torch.bfloat16: 16}


def bind(library: ctypes.CDLL) -> Callable[..., Tensor]:
    """The native `linear(x, weight, bias=None)` of a loaded kernel library."""
    pointer, size = ctypes.c_void_p, ctypes.c_long
    kernels = {torch.float32: library.linear_f32, torch.bfloat16: library.linear_bf16}
    for kernel in kernels.values():
        kernel.argtypes = [pointer, size, pointer, pointer, pointer, size, size, size]
        kernel.restype = None
    empty, max_rows = torch.empty, MAX_ROWS

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = weight.dtype
        num_out, num_in = weight.shape
        *lead, width = x.shape
        rows = x.numel() // num_in if num_in else 0
        if (
            not 0 < rows <= max_rows.get(dtype, 0)
            or width != num_in
            or x.dtype is not dtype
            or not x.is_contiguous()
            or not weight.is_contiguous()
            or (
                bias is not None
                and (bias.dtype is not dtype or bias.shape != (num_out,) or bias.stride(0) != 1)
            )
        ):
            return linear_reference(x, weight, bias)
        out = empty((*lead, num_out), dtype=dtype)
        kernels[dtype](
            *(x.data_ptr(), num_in, weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), rows, num_out, num_in),
        )
        return out

    return linear
