"""What the passes of the decode plan share: calls of the skinny ops, ways between nodes, proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ostinato.ops import skinny_gated, skinny_linear
from ostinato.passes.base import Tally
from ostinato.passes.proof import prove
from ostinato.passes.values import Values, argument, concrete_shape, same_shape, same_size, tensor

aten = torch.ops.aten

PLACES: dict[Any, dict[str, int]] = {
    op: {wanted.name: place for place, wanted in enumerate(op._schema.arguments)}
    for op in (skinny_linear.OP, skinny_gated.OP)
}
NORM = ("norm_weight", "eps", "offset", "round_first")
NO_NORM = (None, 0.0, 0.0, False)
PROOF_ROWS = 32  # of a weight: rows do not meet in a product, and a whole large weight takes seconds to check

# Views and selections of whole rows: the last dimension goes through them as it is.
_RESHAPES = {aten.view.default, aten.reshape.default}
_ROW_STEPS = {aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.index.Tensor} | _RESHAPES


def is_skinny(node: fx.Node) -> bool:
    return node.target in PLACES


def get(call: fx.Node, name: str) -> Any:
    """Argument of a skinny op by name; the passes spell all of them out."""
    return call.args[PLACES[call.target][name]]


def put(call: fx.Node, **changes: Any) -> None:
    """Replace arguments of a skinny op by name."""
    args = list(call.args)
    for name, value in changes.items():
        args[PLACES[call.target][name]] = value
    call.args = tuple(args)


def keeps_rows(node: fx.Node, source: fx.Node) -> bool:
    """Does `node` only select or rearrange whole rows (last dimensions) of `source`?"""
    if node.target not in _ROW_STEPS or argument(node, 0) is not source:
        return False
    before, after = tensor(source), tensor(node)
    if not after.dim() or not same_size(before.shape[-1], after.shape[-1]):
        return False
    if node.target == aten.index.Tensor:
        return len(argument(node, 1)) < before.dim() or argument(node, 1)[-1] is None
    if node.target in (aten.select.int, aten.slice.Tensor):
        return bool(argument(node, 1, 0) % before.dim() != before.dim() - 1)
    if node.target == aten.unsqueeze.default:
        return bool(argument(node, 1) % after.dim() != after.dim() - 1)
    return True


def behind_views(node: Any) -> Any:
    """The node that `node` shows in another shape: `[T, N]` as `[1, T, N]`, say."""
    while isinstance(node, fx.Node) and node.target in _RESHAPES | {aten.unsqueeze.default, aten.select.int}:
        source = argument(node, 0)
        if not keeps_rows(node, source) or not _same_rows(tensor(node), tensor(source)):
            break
        node = source
    return node


def _same_rows(a: Tensor, b: Tensor) -> bool:
    """Equal shapes but for dimensions of one."""
    sizes = [[size for size in t.shape[:-1] if not same_size(size, 1)] for t in (a, b)]
    return len(sizes[0]) == len(sizes[1]) and all(map(same_size, *sizes))


def ways_down(node: fx.Node) -> Iterator[list[fx.Node]]:
    """Every way from `node` through steps that keep whole rows: the steps, then the first other reader."""
    for user in node.users:
        if keeps_rows(user, node):
            for way in ways_down(user):
                yield [user, *way]
        else:
            yield [user]


def with_rank(graph: fx.Graph, node: fx.Node, like: fx.Node, values: Values) -> fx.Node:
    """`node` at the insertion point, seen with as many dimensions as `like`: [T, N] or [1, T, N]."""
    missing = tensor(like).dim() - tensor(node).dim()
    for _ in range(missing):
        node = values.add_call(graph, aten.unsqueeze.default, (node, 0), like=node)
    for _ in range(-missing):
        node = values.add_call(graph, aten.select.int, (node, 0, 0), like=node)
    return node


def is_one_run_of_rows(value: Tensor) -> bool:
    """[T, K] or [1, T, K]."""
    return value.dim() == 2 or (value.dim() == 3 and same_size(value.shape[0], 1))


def erase_unused(graph: fx.Graph, candidates: Iterable[fx.Node]) -> None:
    """Erase those that nobody reads, last ones first."""
    for node in sorted(set(candidates), reverse=True):
        if not node.users:
            graph.erase_node(node)


def alike(a: fx.Node, b: fx.Node) -> bool:
    """Same type and shape."""
    return tensor(a).dtype == tensor(b).dtype and same_shape(tensor(a), tensor(b))


class Proofs:
    """Runs each kind of rewrite once, before and after, on random tensors of the graph's widths."""

    def __init__(self, name: str, tally: Tally) -> None:
        self._name, self._tally = name, tally
        self._known: set[Any] = set()

    def check(
        self,
        anchor: fx.Node,
        call: fx.Node,
        plain: Callable[..., Any],
        fused: Callable[..., Any],
        *extra: Any,
        **vectors: fx.Node | None,
    ) -> None:
        """Compare `plain` and `fused` of (x, weight, *vectors), those that are None left out, both named.

        `call` gives the sizes of x and weight; a vector is 1-D (a norm weight, a bias) or has the rows of x.
        `extra` tells kinds apart that the sizes do not.
        """
        if not self._tally.proves:
            return
        weight = tensor(get(call, "weight"))
        rows = min(int(weight.shape[0]), PROOF_ROWS)
        shapes = {"x": concrete_shape(tensor(get(call, "x")), {}), "weight": (rows, int(weight.shape[1]))}
        types = {"x": weight.dtype, "weight": weight.dtype}
        for name, node in vectors.items():
            if node is not None:
                value = tensor(node)
                is_over_k = name == "norm_weight"
                leading = () if value.dim() == 1 else shapes["x"][:-1]
                shapes[name] = (*leading, shapes["weight"][1] if is_over_k else rows)
                types[name] = value.dtype
        key = (tuple(shapes.items()), tuple(types.values()), plain.__name__, *extra)
        if key in self._known:
            return
        self._known.add(key)
        seed = torch.Generator().manual_seed(len(self._known))
        samples = [torch.randn(shapes[name], generator=seed).to(types[name]) for name in shapes]
        names = list(shapes)

        def by_name(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
            def run(*tensors: Tensor) -> tuple[Tensor, ...]:
                result = function(**dict(zip(names, tensors, strict=True)))
                return result if isinstance(result, tuple) else (result,)

            return run

        what = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        description = f"{weight.dtype}: {what}".removeprefix("torch.")
        proof = prove(by_name(plain), by_name(fused), samples, truth=by_name(plain), description=description)
        self._tally.prove(self._name, anchor, proof)
