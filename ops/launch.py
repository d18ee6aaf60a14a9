"""What the Triton launchers share: triton once it is needed, rows of a tensor, the device to launch on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from threading import RLock
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops.kernel_store import STORE, Binary, Variant, capability
from ostinato.ops.triton_kernels import TritonKernel, compile_variant

__all__ = [
    "KERNEL_FLOATS",
    "as_rows",
    "ceil_to_power_of_2",
    "has_pdl",
    "jit",
    "on_device",
    "tl",
    "triton_function",
    "with_dense_heads",
]

KERNEL_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class constexpr:
    """What a kernel's annotations say while triton is not imported: triton goes by the name of the class."""


# Stands for `triton.language` in annotations; a kernel that is used gets the real one instead.
tl: Any = SimpleNamespace(constexpr=constexpr)
_making = RLock()
_HERE = nullcontext()


def jit(body: Callable[..., None] | None = None, **options: Any) -> Any:
    """`triton.jit`, put off until a kernel is launched or asked for: importing triton takes 0.1 s.

    Triton sees a copy of the body whose globals hold triton's own objects in the place of our stand-ins.
    Where triton is missing, the first use raises EngineError.
    """
    return _Kernel(body, options) if body is not None else lambda body: _Kernel(body, options)


def triton_function(kernel: Any) -> Any:
    """triton's object of a kernel made by `jit`; its `fn` is the Python function. Raises EngineError."""
    return kernel.made() if isinstance(kernel, _Kernel) else kernel


class _Kernel:
    """A kernel that triton has not seen yet.

    `kernel[grid](...)` runs in Triton's interpreter on CPU tensors, and on a GPU as `triton_kernels` has it;
    every other attribute is triton's.
    """

    def __init__(self, body: Callable[..., None], options: dict[str, Any]) -> None:
        self.fn, self._options = body, options
        self._made: Any = None
        self._on_gpu: TritonKernel | None = None

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
                names = self.fn.__globals__
                seen = {name: triton.language for name, value in names.items() if value is tl}
                called = {id(kernel): kernel.made() for kernel in self._called()}
                seen |= {name: called[id(value)] for name, value in names.items() if id(value) in called}
                body = FunctionType(
                    self.fn.__code__, {**names, **seen}, self.fn.__name__, self.fn.__defaults__
                )
                update_wrapper(body, self.fn)
                symbol = f"{self.fn.__module__.rpartition('.')[2]}{self.fn.__name__}"  # for profilers
                self._made = triton.jit(body, repr=lambda _: symbol, **self._options)
            return self._made

    def compile(self, variant: Variant, capability: int) -> tuple[Binary, bytes]:
        """Machine code of a variant; needs no GPU."""
        return compile_variant(self.made(), variant, capability)

    def _modules(self) -> Iterator[str]:
        yield self.fn.__module__
        for kernel in self._called():
            yield from kernel._modules()

    def _called(self) -> Iterator["_Kernel"]:
        for name in self.fn.__code__.co_names:
            value = self.fn.__globals__.get(name)
            if isinstance(value, _Kernel) and value is not self:
                yield value

    def __getitem__(self, grid: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            if (isinstance(args[0], Tensor) and args[0].is_cuda) or _is_dry():
                if self._on_gpu is None:
                    plain = self._options.get("do_not_specialize", ())
                    self._on_gpu = TritonKernel(self.fn, [*self._modules()], plain, self.made)
                self._on_gpu.launch(grid, args, kwargs)
            else:
                kwargs.pop("launch_pdl", None)  # the interpreter knows no launch options but these
                self.made()[grid](*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools that look at every object of a module shall not import triton
            raise AttributeError(name)
        return getattr(self.made(), name)


def _is_dry() -> bool:
    """Whether launches are only noted, which also works for CPU tensors."""
    recording = STORE.recording_now
    return recording is not None and recording.is_dry and recording.is_mine()


def has_pdl(x: Tensor) -> bool:
    """Whether a kernel on the device of `x` may begin before the last one ends (dependent launch)."""
    return x.is_cuda and capability(x.get_device()) >= 90


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one of `x`."""
    at = x.get_device()
    return _HERE if at < 0 or at == torch._C._cuda_getDevice() else torch.cuda.device(at)


def as_rows(x: Tensor) -> Tensor:
    """`x` [..., D], not empty, as [rows, D] with dense rows; a copy only where strides cannot say it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def with_dense_heads(x_THD: Tensor) -> Tensor:
    """`x`, or a copy of it, whose last dimension is contiguous."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def ceil_to_power_of_2(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
