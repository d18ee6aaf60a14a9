"""skinny_linear(x) + h  ->  skinny_linear(x, residual=h); of an add_rms_norm, a rms_norm is left.

Numerics: close (the product is not rounded before the sum).  For the decode plan only.
The layers' branches end this way; a scaled branch (granite) or a normed one (gemma2, olmo2) stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ostinato.ops import add_rms_norm, rms_norm, skinny_linear
from ostinato.passes.aliases import Aliases
from ostinato.passes.base import Pass, Tally
from ostinato.passes.skinny import NO_NORM, Proofs, alike, behind_views, erase_unused, get, with_rank
from ostinato.passes.values import Values, argument, is_tensor

aten = torch.ops.aten


class FuseSkinnyResidual(Pass):
    name = "skinny_residual"
    numerics = "close"
    needs = ("skinny_linear",)

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        aliases, values, proofs = Aliases(graph), Values(), Proofs(self.name, tally)
        for node in list(graph.nodes):
            if node.target not in (aten.add.Tensor, add_rms_norm.OP):
                continue
            place = _linear_place(node)
            if place is None:
                continue
            reason = _refusal(node, place, aliases)
            if reason:
                tally.refuse(reason)
            elif tally.accept():
                _fuse(graph, node, place, values, proofs)


def _linear_place(node: fx.Node) -> int | None:
    """Which of the two summands is a linear layer: the later one, if both are."""
    linears = [
        (linear, place)
        for place in (0, 1)
        if is_tensor(argument(node, place))
        and (linear := behind_views(argument(node, place))).target == skinny_linear.OP
    ]
    return max(linears)[1] if linears else None


def _refusal(node: fx.Node, place: int, aliases: Aliases) -> str | None:
    branch, residual = argument(node, place), argument(node, 1 - place)
    linear = behind_views(branch)
    if node.target == aten.add.Tensor and (not is_tensor(residual) or node.kwargs.get("alpha", 1) != 1):
        return "the sum is not of two tensors taken once"
    if not alike(branch, residual):
        return "the two parts of the sum differ in type or shape"
    if get(linear, "residual") is not None:
        return "a residual is added already"
    if any(len(seen.users) > 1 for seen in _seen(branch, linear)):
        return "the result of the linear layer is used elsewhere too"
    if aliases.writer_between(linear, node, linear.all_input_nodes, {linear}) is not None:
        return "an input of the linear layer is written before the sum"
    return None


def _seen(branch: fx.Node, linear: fx.Node) -> list[fx.Node]:
    """The linear layer and its views, down to `branch`."""
    nodes = [branch]
    while nodes[-1] is not linear:
        nodes.append(argument(nodes[-1], 0))
    return nodes


def _fuse(graph: fx.Graph, node: fx.Node, place: int, values: Values, proofs: Proofs) -> None:
    branch, residual = argument(node, place), argument(node, 1 - place)
    linear = behind_views(branch)
    views = _seen(branch, linear)
    with graph.inserting_before(node):
        x = with_rank(graph, get(linear, "x"), branch, values)
        args = (x, get(linear, "weight"), get(linear, "bias"), *NO_NORM, residual)
        total = values.add_call(graph, skinny_linear.OP, args, like=linear)
        vectors = {"residual": residual, "bias": get(linear, "bias")}
        if node.target == aten.add.Tensor:
            node.replace_all_uses_with(total)
            proofs.check(total, total, plain_sum, fused_sum, **vectors)
        else:
            weight, *numbers = (argument(node, at) for at in range(2, 6))
            normed = values.add_call(graph, rms_norm.OP, (total, weight, *numbers), like=node)
            for part in list(node.users):
                part.replace_all_uses_with(normed if argument(part, 1) == 0 else total)
                graph.erase_node(part)
            proofs.check(total, total, *functions(*numbers), *numbers, scale=weight, **vectors)
    erase_unused(graph, [node, *views])


def plain_sum(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Any:
    return F.linear(x, weight, bias) + residual


def fused_sum(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Any:
    return skinny_linear.OP(x, weight, bias, *NO_NORM, residual)


@functools.cache
def functions(eps: float, offset: float, round_first: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The sum and its norm as they stood and as they are now, for the proof."""

    def plain(x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, bias: Tensor | None = None) -> Any:
        branch = F.linear(x, weight, bias)
        return add_rms_norm.OP(branch, residual, scale, eps, offset, round_first)

    def fused(x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, bias: Tensor | None = None) -> Any:
        total = fused_sum(x, weight, residual, bias)
        return rms_norm.OP(total, scale, eps, offset, round_first), total

    return plain, fused
