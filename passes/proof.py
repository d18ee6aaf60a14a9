"""Check a rewrite by running it: the nodes before and after on random inputs, against float64.

Budget: max|ours - truth| <= 2 * (max|plain - truth| + eps * max|truth|), truth being the nodes before the
rewrite in float64 and plain the same nodes in the model's types. An exact rewrite must be bit-equal to plain.
Memory that the nodes write (KV planes) is compared like a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx


class Proof(NamedTuple):
    """One check. Errors are absolute, of the result that came closest to its budget."""

    description: str
    max_error: float
    budget: float
    ok: bool


Function = Callable[..., Any]


def extract(
    nodes: Iterable[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Copy `nodes` (in graph order) into a module of their own: `inputs` in, a tuple of `outputs` out."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"in_{place}")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def prove(
    plain: Function, fused: Function, inputs: Sequence[Tensor], *, truth: Function | None, description: str
) -> Proof:
    """Run each on copies of `inputs`; results are the returned tensors and the inputs as they are afterwards.

    `truth` is `plain` for float64 inputs; without it `fused` must be bit-equal to `plain`.
    """
    expected, ours = _run(plain, inputs), _run(fused, inputs)
    exact = [None] * len(expected) if truth is None else _run(truth, [_widen(t) for t in inputs])
    checks = [_check(got, want, true) for got, want, true in zip(ours, expected, exact, strict=True)]
    worst = max(checks, key=lambda c: (not c[2], c[0] / c[1] if c[1] else c[0]))
    return Proof(description, *worst)


def _run(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        returned = function(*copies)
    return [*returned, *copies]


def _check(ours: Tensor, plain: Tensor, truth: Tensor | None) -> tuple[float, float, bool]:
    """(error, budget, is it right) of one result."""
    if ours.dtype != plain.dtype or ours.shape != plain.shape:
        return float("inf"), 0.0, False
    if truth is None or not plain.is_floating_point():
        error = float((ours.double() - plain.double()).abs().max()) if plain.numel() else 0.0
        return error, 0.0, torch.equal(ours, plain)
    if not plain.numel():
        return 0.0, 0.0, True
    error = float((ours.double() - truth).abs().max())
    rounding = float((plain.double() - truth).abs().max())
    budget = 2 * (rounding + torch.finfo(plain.dtype).eps * float(truth.abs().max()))
    return error, budget, error <= budget  # NaN compares false


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def in_float64(plain: fx.GraphModule) -> Function:
    """`plain` with every cast to a floating type turned into a cast to float64."""
    return _Float64(plain).run


class _Float64(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def widen(value: Any) -> Any:
            is_float = isinstance(value, torch.dtype) and value.is_floating_point
            return torch.float64 if is_float else value

        args = tuple(widen(value) for value in args)
        return super().call_function(target, args, {key: widen(value) for key, value in kwargs.items()})
