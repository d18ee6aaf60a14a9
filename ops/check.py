"""Argument checks of the ops: shapes written as letters, types, devices; ValueError names both sides.

Sizes that are symbolic (while a graph is traced) are not compared, so a check never adds a guard.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
_passed: set[tuple[Any, ...]] = set()  # shapes that were right before: an op outside a graph is called often
_MOST_PASSED = 4096


def check_shapes(op: str, **tensors: tuple[Tensor, str]) -> None:
    """`x=(x, "T D"), y=(y, "T E")`: a letter is one size everywhere; a leading `*` is any leading sizes."""
    key: tuple[Any, ...] | None = (op, *[(tensor.shape, spelling) for tensor, spelling in tensors.values()])
    try:
        if key in _passed:
            return
    except TypeError:  # symbolic sizes have no hash
        key = None
    bound: dict[str, tuple[Any, str]] = {}
    for name, (tensor, spelling) in tensors.items():
        letters = spelling.split()
        sizes: tuple[Any, ...] = tuple(tensor.shape)
        is_open = letters[0] == "*"
        if len(sizes) < len(letters) - 1 or not (is_open or len(sizes) == len(letters)):
            raise ValueError(f"{op}: {name} has shape {list(sizes)}; it must be {_spelled(letters)}")
        if is_open:
            num_leading = len(sizes) - len(letters) + 1
            sizes = (sizes[:num_leading], *sizes[num_leading:])
        for letter, size in zip(letters, sizes, strict=True):
            before, where = bound.setdefault(letter, (size, name))
            if _differ(before, size):
                raise ValueError(
                    f"{op}: {name} has shape {list(tensor.shape)}, {where} {list(tensors[where][0].shape)}: "
                    f"{_spelled([letter])} is {size} and {before}; {name} must be {_spelled(letters)}"
                )
    if key is not None:
        if len(_passed) >= _MOST_PASSED:
            _passed.clear()
        _passed.add(key)


def check_types(op: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    """All tensors have one and the same type, which is allowed, and live on one device."""
    (first_name, first), *others = tensors.items()
    if first.dtype not in allowed:
        words = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{op}: {first_name} is {first.dtype}; allowed are {words}")
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} but {first_name} is {first.dtype}; cast one of them"
            )
        check_device(op, first_name, first, name, tensor)


def check_device(op: str, first_name: str, first: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.device != first.device:
        raise ValueError(
            f"{op}: {name} is on {tensor.device} but {first_name} on {first.device}; move one of them"
        )


def check_scale_type(op: str, x_name: str, x: Tensor, name: str, scale: Tensor) -> None:
    """A norm weight or rotary table is kept in the activations' type or in float32."""
    if scale.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{op}: {name} is {scale.dtype}; it must be float32 or {x.dtype} like {x_name}")
    check_device(op, x_name, x, name, scale)


def check_dense_planes(op: str, **planes: Tensor) -> None:
    """What a kernel needs of a KV plane, which cannot be copied: heads whose values lie side by side."""
    for name, plane in planes.items():
        if plane.stride(-1) != 1:
            raise ValueError(f"{op}: {name} has strides {plane.stride()}; the last one must be 1 on a GPU")


def _differ(left: Any, right: Any) -> bool:
    if isinstance(left, tuple):
        return len(left) != len(right) or any(map(_differ, left, right))
    return isinstance(left, int) and isinstance(right, int) and left != right


def _spelled(letters: Sequence[str]) -> str:
    return "[" + ", ".join("..." if letter == "*" else letter for letter in letters) + "]"
