"""How often each pass of the decode plan must match, counted from the graph that the plan starts from.

As for the ordinary passes, a count looks for a tell-tale of the construct and leaves the conditions of its
pass alone, so that a pass that refuses more than it should is found out.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ostinato.ops import add_rms_norm, gelu_tanh_mul, paged_attention, rms_norm, rope_kv_write, silu_mul
from ostinato.passes.skinny import behind_views, is_one_run_of_rows, ways_down
from ostinato.passes.values import argument, is_tensor, tensor

aten = torch.ops.aten


def expected_matches(graph: fx.Graph) -> dict[str, int]:
    """Pass name -> least number of matches; what the model does not have is absent."""
    linears = {node for node in graph.nodes if node.target == aten.linear.default and _has_weight(node)}
    counts = {
        "skinny_linear": len(linears),
        "skinny_gated": sum(_is_gate_of(node, linears) for node in graph.nodes),
        "skinny_residual": sum(_ends_branch_of(node, linears) for node in graph.nodes),
        "skinny_norm": sum(_is_norm_of(node, linears) for node in graph.nodes),
        "rope_attention": sum(_is_read_by_own_attention(node) for node in graph.nodes),
    }
    return {name: count for name, count in counts.items() if count}


def _has_weight(node: fx.Node) -> bool:
    return "weight" in argument(node, 1).meta and is_one_run_of_rows(tensor(argument(node, 0)))


def _is_gate_of(node: fx.Node, linears: set[fx.Node]) -> bool:
    """A gate that is the first part of a linear layer without a bias."""
    if node.target not in (silu_mul.OP, gelu_tanh_mul.OP):
        return False
    at = argument(node, 0)
    while at.target in (operator.getitem, aten.chunk.default, aten.split.Tensor, aten.slice.Tensor):
        start = {operator.getitem: argument(at, 1), aten.slice.Tensor: argument(at, 2)}.get(at.target)
        if start:
            return False
        at = argument(at, 0)
    return at in linears and argument(at, 2) is None


def _ends_branch_of(node: fx.Node, linears: set[fx.Node]) -> bool:
    """A sum of which one part is a linear layer that nobody else reads."""
    if node.target not in (aten.add.Tensor, add_rms_norm.OP):
        return False
    return any(_is_branch(argument(node, place), linears) for place in (0, 1))


def _is_branch(part: Any, linears: set[fx.Node]) -> bool:
    if not is_tensor(part):
        return False
    linear = behind_views(part)
    return linear in linears and len(linear.users) == 1 and len(part.users) == 1


def _is_norm_of(node: fx.Node, linears: set[fx.Node]) -> bool:
    """A norm, one that stands alone once its sum is taken up, of which linear layers are the only readers."""
    if node.target == add_rms_norm.OP and _ends_branch_of(node, linears):
        normed = [user for user in node.users if argument(user, 1) == 0]
    else:
        normed = [node] if node.target == rms_norm.OP else []
    readers = [way[-1] for start in normed for way in ways_down(start)]
    return bool(readers) and linears.issuperset(readers)


def _is_read_by_own_attention(node: fx.Node) -> bool:
    """A rotated KV write of which the one reader is an attention over the planes that it writes."""
    if node.target != rope_kv_write.OP or len(node.users) != 1:
        return False
    (reader,) = node.users
    return reader.target == paged_attention.OP and argument(reader, 1) is argument(node, 5)
