"""What a fusion looks for, where it was found, and what forbids to replace it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ostinato.passes.aliases import Aliases
from ostinato.passes.trace import Example
from ostinato.passes.values import concrete_shape, is_tensor, same_shape, tensor


class Spelling(NamedTuple):
    """One way in which a model may write the pattern.

    `pattern` and `replacement` take the names of `examples` as arguments. A tensor is an input: its type
    counts, and those of its sizes that the code writes down. A float, each another, is a constant, read from
    the graph.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: dict[str, Example]
    ends: tuple[fx.Node | None, ...] = ()  # graph nodes of the pattern's outputs, where known
    shared: tuple[str, ...] = ()  # inputs whose preparation other nodes may use too (rotary tables)
    proof_inputs: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})  # random -> possible input


class Match(NamedTuple):
    """A place where a spelling was found."""

    anchor: fx.Node
    spelling: Spelling
    inputs: dict[str, fx.Node]
    constants: dict[str, float]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]  # in graph order

    def value(self, name: str) -> Tensor:
        """The fake tensor of an input."""
        return tensor(self.inputs[name])


def example(node: fx.Node) -> Tensor:
    """A tensor of the node's type and sizes for tracing a pattern; symbols become small numbers."""
    assert is_tensor(node), f"{node.name} makes no single tensor"
    return torch.empty(concrete_shape(tensor(node), {}), dtype=tensor(node).dtype)


def conflict(match: Match, aliases: Aliases) -> str | None:
    """A reason if a node of the match is needed outside, or an input changes while the match computes."""
    own = set(match.nodes)
    depends = {node for name, node in match.inputs.items() if name not in match.spelling.shared}
    for node in match.nodes:
        if any(source in depends for source in node.all_input_nodes):
            depends.add(node)
        if node in match.outputs or node not in depends:
            continue
        if any(user not in own for user in node.users):
            return f"the intermediate result of {name_of(node)} is used elsewhere too"
    writer = aliases.writer_between(match.nodes[0], match.nodes[-1], list(match.inputs.values()), own)
    return f"{name_of(writer)} writes an input in between" if writer is not None else None


def misplaced(match: Match, point: fx.Node) -> str | None:
    """A reason if a new node at `point` would stand before one of its inputs, or after one of its users."""
    if any(point < node for node in match.inputs.values() if node.op != "placeholder"):
        return "an input is computed after the result is used"
    own = set(match.nodes)
    if any(user not in own and user < point for old in match.outputs for user in old.users):
        return "a result is used before the fused op can run"
    return None


def type_differs(old: fx.Node, new: fx.Node) -> str | None:
    """A reason if the op's result cannot stand in for the graph's."""
    was, now = tensor(old), tensor(new)
    if was.dtype != now.dtype:
        return f"the graph's result is {was.dtype}, the op would give {now.dtype}".replace("torch.", "")
    return None if same_shape(was, now) else "the op would give another shape"


def name_of(node: fx.Node) -> str:
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, OpOverload) else node.name
