"""Drop what changes nothing, and spell casts one way.  Numerics: exact.

Gone: metadata asserts, evaluation-mode dropout, aliases, casts to the type at hand, views to the shape at hand, slices
of everything, a transpose that undoes the one before, `x * 1.0`, empty parts of a concatenation, and every node that
nobody uses and that writes nothing. `type_as` and `to.device` on one device become `to.dtype`.
Matches are the nodes removed or respelled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ostinato.passes.aliases import Aliases, is_impure
from ostinato.passes.base import Pass, Tally
from ostinato.passes.values import is_tensor, same_layout, same_shape, tensor

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
    if node.target == aten.transpose.int and _undoes(node, source):
        equal = source.args[0]  # type: ignore[assignment]  # a node: _undoes looked
    if node.target == aten.mul.Tensor and equal is not None:
        # the product is fresh memory: the factor may stand in for it only if neither is ever written
        return None if aliases.is_written(node) or aliases.is_written(source) else equal
    return equal


def _same(node: fx.Node, source: fx.Node) -> bool:
    return True


def _keeps_shape(node: fx.Node, source: fx.Node) -> bool:
    return same_shape(tensor(node), tensor(source))


def _keeps_layout(node: fx.Node, source: fx.Node) -> bool:
    return same_layout(tensor(node), tensor(source)) and tensor(source).is_contiguous()


def _keeps_type(node: fx.Node, source: fx.Node) -> bool:
    was, now = tensor(source), tensor(node)
    return was.dtype == now.dtype and was.device == now.device and _is_plain_cast(node)


def _evaluates(node: fx.Node, source: fx.Node) -> bool:
    return node.args[2] is False


def _is_one(node: fx.Node, source: fx.Node) -> bool:
    factor = node.args[1]
    return isinstance(factor, int | float) and factor == 1 and tensor(node).dtype == tensor(source).dtype


def _is_whole(node: fx.Node, source: fx.Node) -> bool:
    step = node.args[4] if len(node.args) > 4 else 1
    return step == 1 and same_shape(tensor(node), tensor(source))


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
    options = dict(node.kwargs)
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # an OpOverload
    options |= {a.name: v for a, v in zip(schema, node.args, strict=False)}
    asks_for_more = any(options.get(key) for key in ("copy", "memory_format", "layout", "pin_memory"))
    return not asks_for_more and tensor(node.args[0]).device == tensor(node).device  # type: ignore[arg-type]


def _undoes(node: fx.Node, source: fx.Node) -> bool:
    if source.target != aten.transpose.int:
        return False
    rank = tensor(node).dim()
    return {int(d) % rank for d in node.args[1:]} == {int(d) % rank for d in source.args[1:]}  # type: ignore[arg-type]


def _only_part(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """The one part of a concatenation that is not empty. As with a product, only where nothing is written."""
    parts = node.args[0]
    if not isinstance(parts, list | tuple) or not all(is_tensor(part) for part in parts):
        return None
    whole: Tensor = tensor(node)
    dim = int(node.args[1]) % whole.dim() if len(node.args) > 1 else 0  # type: ignore[arg-type]  # a plain int
    full = [
        p
        for p in parts
        if tensor(p).dim() != whole.dim() or not statically_known_true(tensor(p).shape[dim] == 0)
    ]
    if len(full) != 1 or tensor(full[0]).dtype != whole.dtype or not same_shape(tensor(full[0]), whole):
        return None
    return None if aliases.is_written(node) or aliases.is_written(full[0]) else full[0]
