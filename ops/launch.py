"""What the Triton launchers share: triton where it exists, rows of a tensor, the device to launch on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import EngineError

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for this system; references and native kernels do without
    triton = None
    tl = SimpleNamespace(constexpr=object)

__all__ = [
    "KERNEL_FLOATS",
    "as_rows",
    "ceil_to_power_of_2",
    "jit",
    "on_device",
    "tl",
    "with_dense_heads",
]

KERNEL_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def jit(body: Callable[..., None] | None = None, **options: Any) -> Any:
    """`triton.jit`; where triton is missing, a kernel that raises EngineError when it is launched."""
    if triton is None:
        return _MissingKernel() if body is not None else lambda body: _MissingKernel()
    return triton.jit(body, **options)


class _MissingKernel:
    def __getitem__(self, grid: Any) -> Any:
        raise EngineError(
            "this op needs triton on a GPU, and `import triton` failed; install triton (Linux only)"
        )


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def as_rows(x: Tensor) -> Tensor:
    """`x` [..., D], not empty, as [rows, D] with dense rows; a copy only where strides cannot say it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def with_dense_heads(x_THD: Tensor) -> Tensor:
    """`x`, or a copy of it, whose last dimension is contiguous."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def ceil_to_power_of_2(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
