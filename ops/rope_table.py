"""Rotary tables: cos and sin of position * frequency, each frequency in both halves of a row.

Shapes: positions [T], inv_freq [R/2]; returns cos, sin [T, R], contiguous.
Types: positions int64, inv_freq float32; the tables in `dtype` (fp16, bf16, fp32; with float64 frequencies
everything is float64).  `scaling` multiplies both tables (yarn's attention factor; 1.0 elsewhere).
Rounding: as transformers writes it.  The angle is a float32 product, so at position 131072 it is off by up to
2**-8 from the true one, in every implementation alike; cos, sin and their product with `scaling` are float32;
one rounding to `dtype`.  The kernel takes cos and sin with full range reduction, not the fast approximation,
which is wrong from a few thousand radians on.
Source: arXiv:2104.09864.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, check_device, check_shapes, check_types
from ostinato.ops.launch import KERNEL_FLOATS, has_pdl, jit, on_device, tl

BLOCK = 128  # angles of one program


def rope_table_reference(
    positions_T: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    wide = inv_freq.dtype
    angles = positions_T[:, None].to(wide) * inv_freq
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos(), both.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)


@jit(do_not_specialize=["num_angles"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    positions, inv_freq, cos, sin, scaling, num_angles, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_angles
    token, pair = at // HALF, at % HALF
    frequency = tl.load(inv_freq + pair)
    if PDL:
        tl.extra.cuda.gdc_wait()
    angle = tl.load(positions + token, mask=live, other=0).to(tl.float32) * frequency
    first = token * (2 * HALF) + pair
    for_cos, for_sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    tl.store(cos + first, for_cos, mask=live)
    tl.store(cos + first + HALF, for_cos, mask=live)
    tl.store(sin + first, for_sin, mask=live)
    tl.store(sin + first + HALF, for_sin, mask=live)


def _check(positions_T: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> None:
    check_shapes("rope_table", positions=(positions_T, "T"), inv_freq=(inv_freq, "F"))
    check_types("rope_table", (torch.int64,), positions=positions_T)
    check_types("rope_table", (torch.float32, torch.float64), inv_freq=inv_freq)
    check_device("rope_table", "positions", positions_T, "inv_freq", inv_freq)
    if dtype not in FLOATS:
        raise ValueError(f"rope_table: dtype is {dtype}; allowed are float16, bfloat16, float32, float64")


def _on_cpu(
    positions_T: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check(positions_T, inv_freq, dtype)
    return rope_table_reference(positions_T, inv_freq, scaling, dtype)


def _launch(
    positions_T: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _check(positions_T, inv_freq, dtype)
    check_types("rope_table", (torch.float32,), inv_freq=inv_freq)
    if dtype not in KERNEL_FLOATS:
        raise ValueError(f"rope_table: dtype is {dtype}; the kernel makes float16, bfloat16, float32")
    cos, sin = _empty(positions_T, inv_freq, dtype)
    if cos.numel() == 0:
        return cos, sin
    half = inv_freq.shape[0]
    num_angles = positions_T.shape[0] * half
    with on_device(positions_T):
        pdl = has_pdl(positions_T)
        _kernel[(-(-num_angles // BLOCK),)](
            positions_T.contiguous(),
            inv_freq.contiguous(),
            cos,
            sin,
            scaling,
            num_angles,
            HALF=half,
            BLOCK=BLOCK,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return cos, sin


def _empty(positions_T: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (positions_T.shape[0], 2 * inv_freq.shape[0])
    return positions_T.new_empty(shape, dtype=dtype), positions_T.new_empty(shape, dtype=dtype)


torch.library.define(
    "ostinato::rope_table",
    "(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype) -> (Tensor, Tensor)",
)
torch.library.impl("ostinato::rope_table", "CPU", _on_cpu)
torch.library.impl("ostinato::rope_table", "CUDA", _launch)


@torch.library.register_fake("ostinato::rope_table")
def _fake(positions_T: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _check(positions_T, inv_freq, dtype)
    return _empty(positions_T, inv_freq, dtype)


OP = torch.ops.ostinato.rope_table.default
