"""Which nodes write and which share memory: what a rewrite must know before it moves or drops anything."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload


def arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    """Schema argument and given value of a call of an operator; defaults that were not given are left out."""
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # an OpOverload
        if place < len(node.args):
            yield argument, node.args[place]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def nodes_in(value: Any) -> list[fx.Node]:
    """Nodes inside one argument: itself, or the items of a list."""
    if isinstance(value, fx.Node):
        return [value]
    return [item for item in value if isinstance(item, fx.Node)] if isinstance(value, list | tuple) else []


def written(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory this node writes."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    return [
        source
        for argument, value in arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for source in nodes_in(value)
    ]


def is_impure(node: fx.Node) -> bool:
    """Must stay although nobody uses it: graph inputs and outputs, and all that writes memory (case B21)."""
    if node.op in ("placeholder", "output"):
        return True
    return (
        node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    )


class Aliases:
    """Memory owners of each node of a graph: the nodes that allocated what it may show (itself, if fresh)."""

    def __init__(self, graph: fx.Graph) -> None:
        self.writers = [node for node in graph.nodes if written(node)]
        self._owners: dict[fx.Node, frozenset[fx.Node]] = {}
        self._written = frozenset(
            o for w in self.writers for source in written(w) for o in self.owners(source)
        )

    def owners(self, node: fx.Node) -> frozenset[fx.Node]:
        known = self._owners.get(node)
        if known is None:
            sources = _viewed(node)
            known = frozenset(o for s in sources for o in self.owners(s)) if sources else frozenset([node])
            self._owners[node] = known
        return known

    def is_written(self, node: fx.Node) -> bool:
        """Does any node of the graph write memory that `node` shows?"""
        return bool(self._written and self.owners(node) & self._written)

    def writer_between(
        self, first: fx.Node, last: fx.Node, reads: list[fx.Node], own: set[fx.Node]
    ) -> fx.Node | None:
        """A node between first and last, not in `own`, that writes what one of `reads` shows; else None."""
        read = frozenset(o for node in reads for o in self.owners(node))
        for writer in self.writers:
            outside = writer not in own and first < writer and writer < last
            if outside and any(self.owners(source) & read for source in written(writer)):
                return writer
        return None


def _viewed(node: fx.Node) -> list[fx.Node]:
    """Arguments that the result of `node` may share memory with, by the operator's schema."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return nodes_in(node.args[0])
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    if (
        node.target == torch.ops.aten.dropout.default
    ):  # returns its input in evaluation; its schema does not say so
        return nodes_in(node.args[0])
    if not any(returned.alias_info is not None for returned in schema.returns):
        return []
    return [
        s for argument, value in arguments(node) if argument.alias_info is not None for s in nodes_in(value)
    ]
