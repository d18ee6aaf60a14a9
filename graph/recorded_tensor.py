"""A tensor without data that writes down what is done to it, as a weight expression.

Code that only moves numbers (stack, split, permute, reshape, cast) can be run on it once to learn the
expression. A function that is not in `_RECORDERS` raises ModelError with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import ModelError
from ostinato.ops.weight_expr import Expr, cast, concat, reshape, slice_, stack, transpose


class RecordedTensor(Tensor):
    """A tensor on the meta device that knows the expression which would make it."""

    expr: Expr

    @staticmethod
    def __new__(cls, expr: Expr, shape: tuple[int, ...], dtype: torch.dtype) -> RecordedTensor:
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.expr = expr
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents; there are none
        return f"RecordedTensor({self.expr!r:.200})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name not in _FACTS and name not in _RECORDERS:
            raise ModelError(
                f"weight conversion uses {name}, which ostinato cannot carry into a weight program; "
                "save the model once with transformers' save_pretrained, or report the model"
            )
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
        return made if name in _FACTS else _RECORDERS[name](made, args, kwargs)


# Questions about the tensor; "__get__" are its properties (shape, dtype, device ...).
_FACTS = {"__get__", "size", "dim", "numel", "is_floating_point", "is_contiguous", "__len__", "element_size"}


def _wrap(expr: Expr, made: Tensor) -> RecordedTensor:
    return RecordedTensor(expr, tuple(made.shape), made.dtype)


def _dim(value: int, rank: int) -> int:
    return value % rank


def _arg(args: Any, kwargs: Any, position: int, name: str, default: int = 0) -> int:
    return int(args[position] if len(args) > position else kwargs.get(name, default))


def _record_cat(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    dim = _dim(_arg(args, kwargs, 1, "dim"), made.dim())
    return _wrap(concat([part.expr for part in args[0]], dim), made)


def _record_stack(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    dim = _dim(_arg(args, kwargs, 1, "dim"), made.dim())
    return _wrap(stack([part.expr for part in args[0]], dim), made)


def _record_pieces(made: Any, args: Any, kwargs: Any) -> tuple[RecordedTensor, ...]:
    whole: RecordedTensor = args[0]
    dim = _dim(_arg(args, kwargs, 2, "dim"), whole.dim())
    pieces, start = [], 0
    for piece in made:
        stop = start + piece.shape[dim]
        pieces.append(_wrap(slice_(whole.expr, dim, start, stop), piece))
        start = stop
    return tuple(pieces)


def _record_narrow(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    whole: RecordedTensor = args[0]
    dim = _dim(_arg(args, kwargs, 1, "dim"), whole.dim())
    start = _arg(args, kwargs, 2, "start")
    return _wrap(slice_(whole.expr, dim, start, start + made.shape[dim]), made)


def _record_getitem(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    whole, key = args
    if isinstance(key, int) and not isinstance(key, bool):
        at = key % whole.shape[0]
        return _wrap(reshape(slice_(whole.expr, 0, at, at + 1), list(made.shape)), made)
    keys = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(part, slice) and part.step in (None, 1) for part in keys):
        raise ModelError(
            f"weight conversion indexes with {key!r}, which ostinato cannot carry into a weight program"
        )
    expr = whole.expr
    for dim, part in enumerate(keys):
        start, stop, _ = part.indices(whole.shape[dim])
        if (start, stop) != (0, whole.shape[dim]):
            expr = slice_(expr, dim, start, stop)
    return _wrap(expr, made)


def _record_transpose(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    rank = made.dim()
    first, second = _arg(args, kwargs, 1, "dim0"), _arg(args, kwargs, 2, "dim1", 1)
    return _wrap(transpose(args[0].expr, _dim(first, rank), _dim(second, rank)), made)


def _record_t(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    return _wrap(transpose(args[0].expr, 0, 1), made)


def _record_reshape(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    return _wrap(reshape(args[0].expr, list(made.shape)), made)


def _record_same(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    return _wrap(args[0].expr, made)


def _record_cast(made: Tensor, args: Any, kwargs: Any) -> RecordedTensor:
    same = made.dtype == args[0].dtype
    return _wrap(args[0].expr if same else cast(args[0].expr, made.dtype), made)


_RECORDERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "cat": _record_cat,
    "concat": _record_cat,
    "stack": _record_stack,
    "chunk": _record_pieces,
    "split": _record_pieces,
    "narrow": _record_narrow,
    "__getitem__": _record_getitem,
    "transpose": _record_transpose,
    "swapaxes": _record_transpose,
    "t": _record_t,
    "reshape": _record_reshape,
    "view": _record_reshape,
    "flatten": _record_reshape,
    "unflatten": _record_reshape,
    "squeeze": _record_reshape,
    "unsqueeze": _record_reshape,
    "contiguous": _record_same,
    "clone": _record_same,
    "detach": _record_same,
    "to": _record_cast,
    "float": _record_cast,
}
