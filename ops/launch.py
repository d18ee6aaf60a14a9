"""What the Triton launchers share: triton once it is needed, rows of a tensor, the device to launch on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import EngineError

__all__ = [
    "KERNEL_FLOATS",
    "as_rows",
    "ceil_to_power_of_2",
    "jit",
    "on_device",
    "tl",
    "triton_function",
    "with_dense_heads",
]

KERNEL_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class constexpr:
    """What a kernel's annotations say while triton is not imported: triton goes by the name of the class."""


# Stands for `triton.language` in annotations; a module whose kernel is used gets the real one instead.
tl: Any = SimpleNamespace(constexpr=constexpr)
_making = RLock()


def jit(body: Callable[..., None] | None = None, **options: Any) -> Any:
    """`triton.jit`, put off until a kernel is launched or asked for: importing triton takes 0.1 s.

    The first use puts triton's own objects in the place of the stand-ins in the kernel's module, so the
    launches after it cost nothing more. Where triton is missing, that use raises EngineError.
    """
    return _Kernel(body, options) if body is not None else lambda body: _Kernel(body, options)


def triton_function(kernel: Any) -> Any:
    """triton's object of a kernel made by `jit`; its `fn` is the Python function. Raises EngineError."""
    return kernel.made() if isinstance(kernel, _Kernel) else kernel


class _Kernel:
    """A kernel that triton has not seen yet. `kernel[grid](...)` and every attribute are triton's."""

    def __init__(self, body: Callable[..., None], options: dict[str, Any]) -> None:
        self.fn, self._options = body, options
        self._made: Any = None

    def made(self) -> Any:
        try:
            import triton
            import triton.language
        except ImportError as error:
            raise EngineError(
                f"this op needs triton on a GPU, and `import triton` failed ({error}); install triton "
                "(Linux only)"
            ) from error
        with _making:
            if self._made is None:
                self._made = triton.jit(self.fn, **self._options)
                names = self.fn.__globals__
                for name, value in list(names.items()):
                    if value is tl:
                        names[name] = triton.language
                    elif isinstance(value, _Kernel):  # kernels call each other by these names
                        names[name] = value.made()
            return self._made

    def __getitem__(self, grid: Any) -> Any:
        return self.made()[grid]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools that look at every object of a module shall not import triton
            raise AttributeError(name)
        return getattr(self.made(), name)


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
