"""Trace a plain function the way models are traced: torch.export, then the same clean-up.

A pattern and the model's own code then become the same nodes, in every torch version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ostinato.passes.remove_noops import RemoveNoops

Example = Tensor | float  # a float stands for a constant that is read from the graph


class Traced(NamedTuple):
    """A function as a graph. `inputs` are its tensor arguments by name."""

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]  # the calls, in order


_cache: dict[Any, Traced] = {}


def trace(function: Callable[..., Any], examples: dict[str, Example], *, key: Any) -> Traced:
    """Trace `function(**examples)`. Equal `key`s with alike examples are traced once in a process."""
    shapes = tuple(
        (name, tuple(e.shape), e.dtype) if isinstance(e, Tensor) else (name, e)
        for name, e in examples.items()
    )
    traced = _cache.get((key, shapes))
    if traced is None:
        traced = _cache[key, shapes] = _trace(function, examples)
    return traced


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Any], names: list[str], constants: dict[str, float]) -> None:
        super().__init__()
        self.function, self.names, self.constants = function, names, constants

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(**dict(zip(self.names, tensors, strict=True)), **self.constants)


def _trace(function: Callable[..., Any], examples: dict[str, Example]) -> Traced:
    tensors = {name: e for name, e in examples.items() if isinstance(e, Tensor)}
    constants = {name: e for name, e in examples.items() if not isinstance(e, Tensor)}
    with torch.no_grad():
        call = _Call(function, list(tensors), constants)
        exported = torch.export.export(call, tuple(tensors.values()), strict=False)
    RemoveNoops()(exported.graph_module)
    nodes = list(exported.graph_module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return Traced(
        exported.graph_module.graph,
        dict(zip(tensors, placeholders, strict=True)),
        tuple(nodes[-1].args[0]),
        tuple(node for node in nodes if node.op == "call_function"),
    )
