"""act(gate) * up of the halves of one skinny_linear  ->  ostinato::skinny_gated.

Numerics: close (one kernel instead of two; the halves are not rounded in between).  For the decode plan only.
Gate rows come first in the weight, as merge_linears and the models that store one weight have them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import OpOverload

from ostinato.ops import gelu_tanh_mul, silu_mul, skinny_gated, skinny_linear
from ostinato.passes.base import Pass, Tally
from ostinato.passes.skinny import NO_NORM, Proofs, erase_unused, get
from ostinato.passes.values import Values, argument, tensor

aten = torch.ops.aten

ACTIVATIONS = {silu_mul.OP: "silu", gelu_tanh_mul.OP: "gelu_tanh"}


class FuseSkinnyGated(Pass):
    name = "skinny_gated"
    numerics = "close"
    needs = ("skinny_linear",)

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        values, proofs = Values(), Proofs(self.name, tally)
        for node in list(graph.nodes):
            if node.target not in ACTIVATIONS:
                continue
            linear = _whole(node)
            if isinstance(linear, str):
                tally.refuse(linear)
            elif tally.accept():
                activation = ACTIVATIONS[node.target]
                with graph.inserting_before(node):
                    args = (get(linear, "x"), get(linear, "weight"), *NO_NORM, activation)
                    call = values.add_call(graph, skinny_gated.OP, args, like=node)
                node.replace_all_uses_with(call)
                halves = node.all_input_nodes
                erase_unused(graph, [node, *halves, *(argument(half, 0) for half in halves), linear])
                proofs.check(call, call, *functions(node.target, activation), activation)


class _Part(NamedTuple):
    """Columns `start` to `start + size` of `whole`."""

    whole: fx.Node
    start: int
    size: int


def _whole(node: fx.Node) -> fx.Node | str:
    """The linear layer whose halves `node` reads, or why there is none."""
    gate, up = (_part(argument(node, place)) for place in (0, 1))
    if gate is None or up is None or gate.whole is not up.whole:
        return "gate and up are not parts of one result"
    linear = gate.whole
    if linear.target != skinny_linear.OP:
        return "gate and up come from no linear layer"
    width = tensor(linear).shape[-1]
    if (gate.start, gate.size, up.start, up.size) != (0, width // 2, width // 2, width // 2) or width % 2:
        return "gate and up are not the first and the second half"
    if any(get(linear, name) is not None for name in ("bias", "norm_weight", "residual")):
        return "the linear layer of gate and up does more than multiply"
    if any(reader is not node for reader in _readers(linear)):
        return "the result of the linear layer is used elsewhere too"
    return linear


def _part(node: fx.Node) -> _Part | None:
    source = argument(node, 0)
    if node.target == operator.getitem:
        pieces, whole = source.meta["val"], argument(source, 0)
        at, dim = argument(node, 1), argument(source, 2, 0)
        if source.target not in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
            return None
        start = sum(piece.shape[dim] for piece in pieces[:at])
    elif node.target == aten.slice.Tensor and argument(node, 4, 1) == 1:
        whole, dim, start = source, argument(node, 1, 0), argument(node, 2) or 0
    else:
        return None
    rank, size = tensor(whole).dim(), tensor(node).shape[-1]
    is_last = dim % rank == rank - 1
    return _Part(whole, start, size) if is_last and isinstance(size, int) and start >= 0 else None


def _readers(linear: fx.Node) -> list[fx.Node]:
    """Who reads the linear layer's result, or parts of it."""
    found: list[fx.Node] = []
    for user in linear.users:
        is_part = user.target in (operator.getitem, aten.slice.Tensor)
        is_list = user.target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
        found += _readers(user) if is_part or is_list else [user]
    return found


@functools.cache
def functions(gate_op: OpOverload, activation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The product as it stood and as one op, for the proof."""

    def plain(x: Tensor, weight: Tensor) -> Any:
        return gate_op(*F.linear(x, weight).chunk(2, dim=-1))

    def fused(x: Tensor, weight: Tensor) -> Any:
        return skinny_gated.OP(x, weight, *NO_NORM, activation)

    return plain, fused
