"""How an op is run in tests: CPU reference, Triton interpreter at tiny sizes, GPU at real ones."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

T = TypeVar("T")
INTERPRETER, CUDA = "interpreter", "cuda"
ROUTES = [
    "reference",
    pytest.param(
        INTERPRETER,
        marks=pytest.mark.skipif(
            torch.cuda.is_available(), reason="Triton compiles its kernels on this machine"
        ),
    ),
    pytest.param(CUDA, marks=pytest.mark.gpu),
]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def sized(route: str, tiny: T, real: T) -> T:
    return real if route == CUDA else tiny


def run(route: str, module: ModuleType, *args: Any) -> Any:
    """Call the op on CPU tensors and return CPU tensors; arguments that the op mutates are mutated."""
    if route == INTERPRETER:
        with np.errstate(over="ignore"):  # exp of a large number is inf, as on a GPU
            return module._launch(*args)
    if route != CUDA:
        return module.OP(*args)
    moved = [on_gpu(arg) for arg in args]
    result = module.OP(*moved)
    declarations = module.OP._schema.arguments[: len(args)]  # the rest has defaults
    for arg, copy, declared in zip(args, moved, declarations, strict=True):
        if declared.alias_info is not None and declared.alias_info.is_write:
            arg.copy_(copy)
    if isinstance(result, tuple):
        return tuple(part.cpu() for part in result)
    return None if result is None else result.cpu()


def on_gpu(arg: Any) -> Any:
    """A copy on the GPU with the same strides, also where a view skips memory."""
    if not isinstance(arg, Tensor):
        return arg
    base = arg if arg._base is None else arg._base
    return base.cuda().as_strided(arg.shape, arg.stride(), arg.storage_offset())


def in_type(dtype: torch.dtype, args: Sequence[Any]) -> list[Any]:
    """Clones of the arguments with every float tensor in `dtype`."""
    return [
        arg.to(dtype, copy=True) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]


def assert_graph_replays(module: ModuleType, args: Sequence[Any], fresh: Sequence[Any]) -> None:
    """A graph captured on `args` gives, once `fresh` is copied into them, what an eager call gives."""
    held, expected_args = [on_gpu(arg) for arg in args], [on_gpu(arg) for arg in fresh]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module.OP(*held)  # compiles the kernel, which is not allowed while capturing
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module.OP(*held)
    for _ in range(2):
        for to, new in zip(held, expected_args, strict=True):
            if isinstance(to, Tensor):
                to.copy_(new)
        graph.replay()
    eager = module.OP(*expected_args)
    torch.cuda.synchronize()
    if eager is not None:
        torch.testing.assert_close(captured, eager, rtol=0, atol=0, equal_nan=True)
    for to, new in zip(held, expected_args, strict=True):
        if isinstance(to, Tensor):
            torch.testing.assert_close(to, new, rtol=0, atol=0, equal_nan=True)
