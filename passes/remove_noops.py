"""Drop what changes nothing, and spell casts one way.  Numerics: exact.

Gone: metadata asserts, evaluation-mode dropout, aliases, casts to the type at hand, views to the shape at
hand, slices of everything, a transpose or an added dimension that the next view undoes, `x * 1.0`, empty
parts of a concatenation, and every node that nobody uses and that writes nothing. `type_as` and `to.device`
on one device become `to.dtype`. Matches are the nodes removed or respelled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ostinato.passes.aliases import Aliases, arguments, is_impure
from ostinato.passes.base import Pass, Tally
from ostinato.passes.values import argument, is_tensor, same_layout, same_shape, same_size, tensor

aten = torch.ops.aten

_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
}
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten.expand.default}


class RemoveNoops(Pass):
    name = "remove_noops"
    numerics = "exact"

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        aliases = Aliases(graph)
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CHECKS:
                if tally.accept():
                    graph.erase_node(node)
                continue
            same = _equal_node(node, aliases)
            if same is not None and tally.accept():
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            elif same is None and node.target in _CASTS and _is_plain_cast(node) and tally.accept():
                node.args = (node.args[0], tensor(node).dtype)
                node.kwargs, node.target = {}, aten.to.dtype
        for node in reversed(list(graph.nodes)):
            if not node.users and not is_impure(node) and tally.accept():
                graph.erase_node(node)


def _equal_node(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """The argument that `node` equals, if it equals one."""
    source = node.args[0] if node.args else None
    if node.target == aten.cat.default:
        return _only_part(node, aliases)
    if not isinstance(source, fx.Node) or not is_tensor(source) or not is_tensor(node):
        return None
    rule = _RULES.get(node.target)
    equal = source if rule is not None and rule(node, source) else None
    if _undoes(node, source):
        equal = argument(source, 0)
    if node.target == aten.mul.Tensor and equal is not None:
        # the product is fresh memory: the factor may stand in for it only if neither is ever written
        return None if aliases.is_written(node) or aliases.is_written(source) else equal
    return equal


def _same(node: fx.Node, source: fx.Node) -> bool:
    return True


def _keeps_shape(node: fx.Node, source: fx.Node) -> bool:
    return same_shape(tensor(node), tensor(source))


def _keeps_layout(node: fx.Node, source: fx.Node) -> bool:
    return same_layout(tensor(node), tensor(source))


def _keeps_type(node: fx.Node, source: fx.Node) -> bool:
    return _same_type(node, source) and _is_plain_cast(node)


def _same_type(node: fx.Node, source: fx.Node) -> bool:
    return tensor(node).dtype == tensor(source).dtype


def _evaluates(node: fx.Node, source: fx.Node) -> bool:
    return node.args[2] is False


def _is_one(node: fx.Node, source: fx.Node) -> bool:
    factor = node.args[1]
    return isinstance(factor, int | float) and factor == 1 and _same_type(node, source)


def _is_whole(node: fx.Node, source: fx.Node) -> bool:
    return argument(node, 4, 1) == 1 and same_shape(tensor(node), tensor(source))


_RULES: dict[object, Callable[[fx.Node, fx.Node], bool]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.dropout.default: _evaluates,
    aten.contiguous.default: _keeps_layout,
    aten.slice.Tensor: _is_whole,
    aten.mul.Tensor: _is_one,
    **dict.fromkeys(_CASTS, _keeps_type),
    **dict.fromkeys(_VIEWS, _keeps_shape),
}


def _is_plain_cast(node: fx.Node) -> bool:
    """Changes the type at most: same device, no forced copy, no memory format."""
    extra = {"copy", "memory_format", "layout", "pin_memory"}
    asks_for_more = any(
        value and value is not torch.strided for wanted, value in arguments(node) if wanted.name in extra
    )
    return not asks_for_more and tensor(argument(node, 0)).device == tensor(node).device


def _undoes(node: fx.Node, source: fx.Node) -> bool:
    """Do two views, one after the other, lead back to the shape before them?"""
    pair = (source.target, node.target)
    rank = tensor(node).dim()
    if pair == (aten.transpose.int, aten.transpose.int):
        dims, others = ({argument(n, place) % rank for place in (1, 2)} for n in (node, source))
        return dims == others
    if pair == (aten.unsqueeze.default, aten.select.int):
        return bool(argument(node, 1) % (rank + 1) == argument(source, 1) % (rank + 1))
    if pair == (aten.select.int, aten.unsqueeze.default):
        dim = argument(node, 1) % rank
        return bool(dim == argument(source, 1) % rank) and same_shape(
            tensor(node), tensor(argument(source, 0))
        )
    return False


def _only_part(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """The one part of a concatenation that is not empty. As with a product, only where nothing is written."""
    parts = argument(node, 0)
    if not all(is_tensor(part) for part in parts):
        return None
    whole = tensor(node)
    dim = argument(node, 1, 0) % whole.dim()
    full = [part for part in parts if not same_size(tensor(part).shape[dim], 0)]
    if len(full) != 1 or not _same_type(full[0], node) or not same_shape(tensor(full[0]), whole):
        return None
    return None if aliases.is_written(node) or aliases.is_written(full[0]) else full[0]
