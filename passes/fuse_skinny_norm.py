"""skinny ops of rms_norm(x)  ->  the same ops of x, each with the norm inside.

Numerics: close (the norm is not rounded before the product).  For the decode plan only.
Only where nobody but skinny ops reads the norm, or it would be computed twice. A selection of rows between
the two (the rows that want logits) is made before the norm instead: each row is normed for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from ostinato.ops import rms_norm, skinny_gated, skinny_linear
from ostinato.passes.aliases import Aliases
from ostinato.passes.base import Pass, Tally
from ostinato.passes.match import name_of
from ostinato.passes.skinny import NO_NORM, NORM, Proofs, erase_unused, get, is_skinny, put, ways_down
from ostinato.passes.values import Values, argument


class FuseSkinnyNorm(Pass):
    name = "skinny_norm"
    numerics = "close"
    needs = ("skinny_linear", "skinny_residual")

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        aliases, values, proofs = Aliases(graph), Values(), Proofs(self.name, tally)
        for node in list(graph.nodes):
            if node.target != rms_norm.OP:
                continue
            ways = list(ways_down(node))
            if not any(is_skinny(way[-1]) for way in ways):
                continue
            reason = _refusal(node, ways, aliases)
            if reason:
                tally.refuse(reason)
            elif tally.accept():
                _fuse(graph, node, ways, values, proofs)


def _refusal(node: fx.Node, ways: list[list[fx.Node]], aliases: Aliases) -> str | None:
    x = argument(node, 0)
    for *steps, call in ways:
        if not is_skinny(call):
            return f"the norm is read by {name_of(call)} too"
        normed = steps[-1] if steps else node
        if any(other is normed for other in call.args[1:]):
            return "the norm is added, or a weight, not only multiplied"
        if get(call, "norm_weight") is not None:
            return "the op has a norm already"
        if aliases.writer_between(node, call, [x], set()) is not None:
            return "the input of the norm is written before the product"
    return None


def _fuse(graph: fx.Graph, node: fx.Node, ways: list[list[fx.Node]], values: Values, proofs: Proofs) -> None:
    x, weight, *numbers = (argument(node, place) for place in range(5))
    moved: dict[fx.Node, fx.Node] = {node: x}  # what stands for the norm, and for each step behind it
    for *steps, call in ways:
        at = node
        for step in steps:
            if step not in moved:
                with graph.inserting_before(step):
                    rest = step.args[1:]
                    moved[step] = values.add_call(graph, step.target, (moved[at], *rest), like=step)
            at = step
        put(call, x=moved[at], **dict(zip(NORM, (weight, *numbers), strict=True)))
        values.compute(call)
        has_bias = call.target == skinny_linear.OP
        vectors = {name: get(call, name) for name in ("bias", "residual") if has_bias}
        kind = () if has_bias else (get(call, "activation"),)
        proofs.check(
            node, call, *functions(call.target, *numbers, *kind), call.target, *numbers, *kind,
            norm_weight=weight, **vectors,
        )  # fmt: skip
    erase_unused(graph, [node, *(step for way in ways for step in way[:-1])])


@functools.cache
def functions(
    op: OpOverload, eps: float, offset: float, round_first: bool, activation: str = ""
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Norm and product one after the other and as one op, for the proof."""

    def call(x: Tensor, weight: Tensor, norm: tuple[Any, ...], bias: Any, residual: Any) -> Any:
        if op == skinny_gated.OP:
            return op(x, weight, *norm, activation)
        return op(x, weight, bias, *norm, residual)

    def plain(x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Any = None, residual: Any = None) -> Any:
        normed = rms_norm.OP(x, norm_weight, eps, offset, round_first)
        return call(normed, weight, NO_NORM, bias, residual)

    def fused(x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Any = None, residual: Any = None) -> Any:
        return call(x, weight, (norm_weight, eps, offset, round_first), bias, residual)

    return plain, fused
