"""A linear layer over the rows of a step  ->  ostinato::skinny_linear.

Numerics: close (another kernel, for up to 16 rows).  For the decode plan only.  The first pass there: what
stands around a linear layer is then folded into the op, argument by argument.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ostinato.ops import skinny_linear
from ostinato.ops.launch import KERNEL_FLOATS
from ostinato.passes.base import Pass, Tally
from ostinato.passes.skinny import NO_NORM, Proofs, get, is_one_run_of_rows
from ostinato.passes.values import Values, argument, tensor

aten = torch.ops.aten


class LowerSkinnyLinear(Pass):
    name = "skinny_linear"
    numerics = "close"

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        values, proofs = Values(), Proofs(self.name, tally)
        for node in list(graph.nodes):
            if node.target != aten.linear.default:
                continue
            reason = _refusal(node)
            if reason:
                tally.refuse(reason)
            elif tally.accept():
                x, weight, bias = (argument(node, place) for place in range(3))
                with graph.inserting_before(node):
                    args = (x, weight, bias, *NO_NORM, None)
                    call = values.add_call(graph, skinny_linear.OP, args, like=node)
                node.replace_all_uses_with(call)
                graph.erase_node(node)
                proofs.check(call, call, plain, skinny, bias=get(call, "bias"))


def _refusal(node: fx.Node) -> str | None:
    x, weight = (tensor(argument(node, place)) for place in (0, 1))
    if "weight" not in argument(node, 1).meta:
        return "the weight is computed in the graph"
    if weight.dtype not in KERNEL_FLOATS:
        return f"the weight is {weight.dtype}".replace("torch.", "")
    if not is_one_run_of_rows(x):
        return "the input is neither [tokens, width] nor [1, tokens, width]"
    return None


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def skinny(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return skinny_linear.OP(x, weight, bias, *NO_NORM, None)
