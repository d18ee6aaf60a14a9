"""y = x W^T + bias for few rows: the native kernel reads each weight once, at memory speed.

Shapes: x [..., K], weight [N, K], bias [N] -> [..., N].  Types: float32, bfloat16 (sums in float32).
The graph keeps aten.linear; this is what a program calls in its place. Anything else than a few rows of
a dense matrix of these types goes to torch, which is as good or better there.
"""

import ctypes
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor
from torch.nn.functional import linear as linear_reference

from ostinato.ops.native_calls import kernels

# Most rows for which the native kernel is used, by type: above, torch is as fast or faster. Measured on a Zen
# 4 EPYC (AVX-512, avx512_bf16), one thread, against MKL and oneDNN of torch 2.13; see benchmarks/cpu_ops.py.
MAX_ROWS = {torch.float32: 128, torch.bfloat16: 64}


def bind(library: ctypes.CDLL) -> Callable[..., Tensor]:
    """The native `linear(x, weight, bias=None)` of a loaded kernel library."""
    by_type, pack, max_rows = kernels(library, "linear"), Struct("8q").pack, MAX_ROWS

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = weight.dtype
        num_out, num_in = weight.shape
        *lead, width = x.shape
        rows = x.numel() // (num_in or 1)
        if (
            not 0 < rows <= max_rows.get(dtype, 0)
            or width != num_in
            or x.dtype is not dtype
            or not x.is_contiguous()
            or not weight.is_contiguous()
            or not (
                bias is None or (bias.dtype is dtype and bias.shape == (num_out,) and bias.is_contiguous())
            )
        ):
            return linear_reference(x, weight, bias)
        out = x.new_empty(*lead, num_out)
        bias_at = 0 if bias is None else bias.data_ptr()
        args = pack(x.data_ptr(), num_in, weight.data_ptr(), bias_at, out.data_ptr(), rows, num_out, num_in)
        by_type[dtype](args)
        return out

    return linear
