"""Packed weights as small expressions over checkpoint tensors.

A pass that merges projections, or a loader that stacks experts, changes an expression and never touches data;
the data is made once, at pack time, by `evaluate`. Expressions are plain JSON: `["concat", 0, [...]]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# ["load", name] | ["concat", dim, [e...]] | ["stack", dim, [e...]] | ["slice", dim, start, stop, e]
# | ["transpose", dim0, dim1, e] | ["reshape", [sizes], e] | ["cast", dtype name, e]
Expr = list[Any]
CONSTANT = "constant:"  # names that begin so are values of the traced model, not of a checkpoint


def load(name: str) -> Expr:
    return ["load", name]


def concat(parts: list[Expr], dim: int = 0) -> Expr:
    return ["concat", dim, parts]


def stack(parts: list[Expr], dim: int = 0) -> Expr:
    return ["stack", dim, parts]


def slice_(expr: Expr, dim: int, start: int, stop: int) -> Expr:
    return ["slice", dim, start, stop, expr]


def transpose(expr: Expr, dim0: int, dim1: int) -> Expr:
    return ["transpose", dim0, dim1, expr]


def reshape(expr: Expr, sizes: list[int]) -> Expr:
    return ["reshape", sizes, expr]


def cast(expr: Expr, dtype: torch.dtype) -> Expr:
    return ["cast", str(dtype).removeprefix("torch."), expr]


def sources(expr: Expr) -> Iterator[str]:
    """Checkpoint names that the expression reads, in order, with repeats."""
    if expr[0] == "load":
        yield expr[1]
    elif expr[0] in ("concat", "stack"):
        for part in expr[2]:
            yield from sources(part)
    else:
        yield from sources(expr[-1])


def evaluate(expr: Expr, read: Callable[[str], Tensor]) -> Tensor:
    """Compute the packed tensor; `read(name)` gives one checkpoint tensor. ValueError: unknown form."""
    match expr:
        case ["load", str(name)]:
            return read(name)
        case ["concat", int(dim), list(parts)]:
            return torch.cat([evaluate(part, read) for part in parts], dim)
        case ["stack", int(dim), list(parts)]:
            return torch.stack([evaluate(part, read) for part in parts], dim)
        case ["slice", int(dim), int(start), int(stop), list(inner)]:
            return evaluate(inner, read).narrow(dim, start, stop - start)
        case ["transpose", int(dim0), int(dim1), list(inner)]:
            return evaluate(inner, read).transpose(dim0, dim1)
        case ["reshape", list(sizes), list(inner)]:
            return evaluate(inner, read).reshape(sizes)
        case ["cast", str(name), list(inner)]:
            return evaluate(inner, read).to(getattr(torch, name))
    raise ValueError(f"weight expression {expr!r:.200}: unknown form")
