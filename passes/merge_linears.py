"""Linear layers over one input become one layer with their weights stacked; each result is a slice of it.

QKV, gate and up.  Numerics: close (a wider matrix product may sum in another order).
The stacked weight is a new graph input whose `meta["weight"]` is the concatenation of the old expressions;
slices keep the wide row stride, nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ostinato.ops.weight_expr import concat
from ostinato.passes.base import Pass, Tally
from ostinato.passes.proof import prove
from ostinato.passes.values import Values, argument, concrete_shape, copy_origin, tensor

aten = torch.ops.aten

PROOF_ROWS = (
    64  # of each weight: rows do not meet in a product, and a whole large weight takes seconds to check
)


class MergeLinears(Pass):
    name = "merge_linears"
    numerics = "close"

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        proven: set[Any] = set()
        values = Values()
        for group in _groups(graph):
            reason = _refusal(group)
            if reason:
                tally.refuse(reason)
            elif tally.accept():
                if tally.proves:
                    self._prove(group, tally, proven)
                _merge(graph, group, values)

    def _prove(self, group: list[fx.Node], tally: Tally, proven: set[Any]) -> None:
        shape = concrete_shape(tensor(_input(group[0])), {})
        widths = [min(int(tensor(_weight(node)).shape[0]), PROOF_ROWS) for node in group]
        dtype, has_bias = tensor(group[0]).dtype, _bias(group[0]) is not None
        key = (shape, tuple(widths), dtype, has_bias)
        if key in proven:
            return
        proven.add(key)
        seed = torch.Generator().manual_seed(len(proven))
        sizes = [shape, *((w, shape[-1]) for w in widths), *((w,) for w in widths if has_bias)]
        inputs = [torch.randn(size, generator=seed).to(dtype) for size in sizes]
        count = len(group)

        def split(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            biases = tensors[count:] or (None,) * count
            return tuple(F.linear(x, w, b) for w, b in zip(tensors[:count], biases, strict=True))

        def merged(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            bias = torch.cat(tensors[count:]) if has_bias else None
            return torch.split(F.linear(x, torch.cat(tensors[:count]), bias), widths, -1)

        what = f"{dtype}: x {list(shape)}, {count} weights of {', '.join(map(str, widths))} rows"
        proof = prove(split, merged, inputs, truth=split, description=what.removeprefix("torch."))
        tally.prove(self.name, group[0], proof)


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Linear layers by input, where two or more; only weights that are graph inputs can be stacked."""
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target == aten.linear.default and "weight" in _weight(node).meta:
            by_input.setdefault(_input(node), []).append(node)
    return [group for group in by_input.values() if len(group) > 1]


def _refusal(group: list[fx.Node]) -> str | None:
    if len({tensor(_weight(node)).dtype for node in group}) > 1:
        return "parallel weights differ in type"
    if len({_bias(node) is None for node in group}) > 1:
        return "some of the parallel layers have a bias and some have none"
    biases = [bias for node in group if (bias := _bias(node)) is not None]
    if any("weight" not in bias.meta for bias in biases):
        return "a bias is computed in the graph"
    if any(len(part.users) > 1 for node in group for part in (_weight(node), *biases)):
        return "a weight is used elsewhere too"
    return None


def _merge(graph: fx.Graph, group: list[fx.Node], values: Values) -> None:
    first = group[0]
    args = [_input(first), _stack(graph, [_weight(node) for node in group])]
    if _bias(first) is not None:
        args.append(_stack(graph, [bias for node in group if (bias := _bias(node)) is not None]))
    with graph.inserting_before(first):
        wide = values.add_call(graph, aten.linear.default, tuple(args), like=first)
    start, old_inputs = 0, []
    for node in group:
        size = int(tensor(_weight(node)).shape[0])
        dim = tensor(node).dim() - 1
        with graph.inserting_before(first):
            part = values.add_call(graph, aten.slice.Tensor, (wide, dim, start, start + size), like=node)
        start += size
        node.replace_all_uses_with(part)
        old_inputs += node.all_input_nodes[1:]
    for node in group:
        graph.erase_node(node)
    for node in old_inputs:
        graph.erase_node(node)
    values.refresh(user for part in wide.users for user in part.users)


def _stack(graph: fx.Graph, parts: list[fx.Node]) -> fx.Node:
    """A new graph input for the rows of `parts`, one after another."""
    with graph.inserting_before(parts[0]):
        stacked = graph.placeholder(f"{parts[0].name}_merged_{len(parts)}")
    copy_origin(parts[0], stacked)
    stacked.meta.update({key: value for key, value in parts[0].meta.items() if key == "role"})
    stacked.meta["weight"] = concat([part.meta["weight"] for part in parts])
    with tensor(parts[0]).fake_mode:  # type: ignore[attr-defined]  # values are fake tensors
        stacked.meta["val"] = torch.cat([tensor(part) for part in parts])
    return stacked


def _input(node: fx.Node) -> fx.Node:
    source: fx.Node = argument(node, 0)
    return source


def _weight(node: fx.Node) -> fx.Node:
    weight: fx.Node = argument(node, 1)
    return weight


def _bias(node: fx.Node) -> fx.Node | None:
    bias: fx.Node | None = argument(node, 2)
    return bias
