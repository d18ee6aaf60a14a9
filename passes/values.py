"""The example value of a node (`meta["val"]`, a fake tensor): read, compare, compute for new nodes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


def argument(node: fx.Node, place: int, default: Any = None) -> Any:
    """Positional argument of a call; calls in exported graphs leave out trailing defaults."""
    return node.args[place] if place < len(node.args) else default


def tensor(node: fx.Node) -> Tensor:
    """The fake tensor of a node that makes one tensor."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node.name} makes no single tensor"
    return value


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def same_size(a: Any, b: Any) -> bool:
    """Equal for every number that the symbols can take."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr:
        return True  # the common case, without the solver
    return bool(statically_known_true(a == b))


def same_shape(a: Tensor, b: Tensor) -> bool:
    return a.dim() == b.dim() and all(map(same_size, a.shape, b.shape))


def same_layout(a: Any, b: Any) -> bool:
    """Same type, shape and strides; tuples item by item."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and same_shape(a, b) and all(map(same_size, a.stride(), b.stride()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_layout, a, b))
    return type(a) is type(b)


def concrete_shape(value: Tensor, sizes: dict[Any, int], *, first: int = 5) -> tuple[int, ...]:
    """Shape with numbers for symbols; a new symbol takes the next number from `first` on, kept in `sizes`."""
    shape = []
    for size in value.shape:
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            for symbol in sorted(expression.free_symbols, key=str):
                sizes.setdefault(symbol, first + len(sizes))
            shape.append(int(expression.subs(sizes)))
        else:
            shape.append(size)
    return tuple(shape)


class Values:
    """Computes values of new nodes. Equal calls, such as those of thirty equal layers, are computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def compute(self, node: fx.Node) -> Any:
        """Set and return `meta["val"]` of a call node from the values of its arguments; no guard is added."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        key = (node.target, _key(args), _key(kwargs))
        if key not in self._known:
            self._known[key] = _call(node.target, args, kwargs)
        node.meta["val"] = self._known[key]
        return node.meta["val"]

    def refresh(self, nodes: Iterable[fx.Node]) -> None:
        """Recompute the values of `nodes` and, where the layout changed, of what follows.

        A view that the new strides do not allow becomes a reshape.
        """
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node.op != "call_function" or "val" not in node.meta:
                continue
            before = node.meta["val"]
            try:
                after = self.compute(node)
            except (RuntimeError, ValueError):
                if node.target != aten.view.default:
                    raise
                node.target = aten.reshape.default
                after = self.compute(node)
            if not same_layout(before, after):
                pending.extend(node.users)

    def add_call(self, graph: fx.Graph, target: Any, args: tuple[Any, ...], *, like: fx.Node) -> fx.Node:
        """New call at the graph's insertion point, with its value and the origin of `like`."""
        node = graph.call_function(target, args)
        copy_origin(like, node)
        self.compute(node)
        return node


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    mode = detect_fake_mode((args, kwargs))
    shape_env = mode.shape_env if mode is not None else None
    guards = shape_env.suppress_guards() if shape_env is not None else nullcontext()
    with (
        mode or nullcontext(),
        guards,
        enable_python_dispatcher(),
    ):  # torch 2.11: C++ linear wants plain sizes
        return target(*args, **kwargs)


def _key(value: Any) -> Any:
    """What of an argument decides about the layout of the result."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, _key(tuple(value.shape)), _key(value.stride())
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    if isinstance(value, dict):
        return tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def copy_origin(source: fx.Node, node: fx.Node) -> None:
    """Note the module and the source line of `source` as those of `node`."""
    node.meta.update(
        {key: source.meta[key] for key in ("nn_module_stack", "stack_trace") if key in source.meta}
    )
