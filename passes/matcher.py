"""Find a traced pattern in a graph, starting from one anchor node; say what differs where it is not found.

Sums and products match in either order; a dimension matches counted from either end; a number that the
pattern declares as a constant matches any number and is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ostinato.passes.trace import Traced
from ostinato.passes.values import argument, is_tensor, tensor

aten = torch.ops.aten

_COMMUTES = {aten.add.Tensor, aten.mul.Tensor}
_ADDS_DIM = {aten.unsqueeze.default, aten.stack.default}


Nodes = dict[fx.Node, fx.Node]  # pattern node -> graph node


class Found(NamedTuple):
    """Where a pattern was found: pattern node -> graph node, constant name -> number."""

    nodes: Nodes
    constants: dict[str, float]


class Miss(NamedTuple):
    """Why it was not found; `progress` counts the nodes that did fit."""

    progress: int
    reason: str


def find(
    pattern: Traced,
    anchor: fx.Node,
    *,
    constants: dict[str, float],
    ends: Sequence[fx.Node | None] = (),
) -> Found | Miss:
    """Match `pattern` so that its node of the anchor's operator is `anchor`.

    `constants` are the numbers in the pattern that stand for any number. `ends` names the graph nodes of the
    pattern's outputs where the caller knows them.
    """
    starts = [node for node in pattern.nodes if node.target == anchor.target]
    assert starts, f"the pattern has no {anchor.target}"
    miss = Miss(0, "nothing fits")
    for start in starts:
        search = _Search(pattern, {number: name for name, number in constants.items()})
        known = [(p, g) for p, g in zip(pattern.outputs, ends, strict=False) if g is not None]
        nodes = search.solve([(start, anchor), *known], {})
        found = search.miss if nodes is None else search.with_constants(nodes)
        if isinstance(found, Found):
            return found
        miss = max(miss, found, key=lambda m: m.progress)
    return miss


Pairs = list[tuple[fx.Node, fx.Node]]


class _Search:
    """Backtracking over the few choices: operand order, and which user of a matched node to follow."""

    def __init__(self, pattern: Traced, names: dict[float, str]) -> None:
        self.pattern, self.names = pattern, names
        self.inputs = {node: name for name, node in pattern.inputs.items()}
        self.miss = Miss(-1, "nothing fits")

    def solve(self, pending: Pairs, nodes: Nodes) -> Nodes | None:
        pending = list(pending)
        while pending:
            want, have = pending.pop(0)
            if want in nodes:
                if nodes[want] is have:
                    continue
                again = f"{_short(have)} where the pattern reads its {_short(want)} again"
                self._fail(
                    nodes, f"{self.inputs[want]} would be two values" if want in self.inputs else again
                )
                return None
            reason = self._differs(want, have, nodes)
            if reason:
                self._fail(nodes, reason)
                return None
            nodes = {**nodes, want: have}
            if want in self.inputs:
                continue
            pairs = self._pairs(want, have)
            if isinstance(pairs, str):
                self._fail(nodes, pairs)
                return None
            if want.target in _COMMUTES and len(pairs) == 2:
                swapped = [(pairs[0][0], pairs[1][1]), (pairs[1][0], pairs[0][1])]
                return self.solve(pairs + pending, nodes) or self.solve(swapped + pending, nodes)
            pending = pairs + pending
        return self._follow_users(nodes)

    def _follow_users(self, nodes: Nodes) -> Nodes | None:
        """Everything above the matched nodes is done: go down to a pattern node that is still open."""
        taken = set(nodes.values())
        for want in self.pattern.nodes:
            known = [source for source in want.all_input_nodes if source in nodes]
            if want in nodes or not known:
                continue
            # the last one: an input of the pattern has more users than a step of it
            source = nodes[max(known)]
            users = " and ".join(sorted({_short(user) for user in source.users})) or "nothing"
            self._fail(nodes, f"{_short(source)} is used by {users}, not by {_short(want)}")
            for have in source.users:
                if have not in taken and have.target == want.target:
                    solved = self.solve([(want, have)], nodes)
                    if solved is not None:
                        return solved
            return None
        return nodes

    def _differs(self, want: fx.Node, have: fx.Node, nodes: Nodes) -> str | None:
        if want in self.inputs:
            if not is_tensor(have):
                return f"{self.inputs[want]} is no tensor"
            wanted, got = tensor(want), tensor(have)
            if wanted.dtype != got.dtype:
                return f"{self.inputs[want]} is {_dtype(got)}, not {_dtype(wanted)}"
            if wanted.dim() != got.dim():
                return f"{self.inputs[want]} has {got.dim()} dimensions, not {wanted.dim()}"
            return None
        if have.op != "call_function" or have.target != want.target:
            return f"{_short(have)} where the pattern has {_short(want)}"
        if have in nodes.values():
            return f"one {_short(have)} would serve twice"
        return None

    def _pairs(self, want: fx.Node, have: fx.Node) -> Pairs | str:
        """Node arguments that must fit as well; a reason if a plain argument differs."""
        pairs: Pairs = []
        for (name, wanted), (_, got) in zip(full_arguments(want), full_arguments(have), strict=True):
            sides = [(wanted, got)]
            if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
                if len(wanted) != len(got):
                    return f"{_short(have)} takes {len(got)} values as {name}, the pattern {len(wanted)}"
                sides = list(zip(wanted, got, strict=True))
            for w, g in sides:
                if isinstance(w, fx.Node) and isinstance(g, fx.Node):
                    pairs.append((w, g))
                elif isinstance(w, fx.Node) or isinstance(g, fx.Node):
                    return f"{_short(have)} takes {_plain(g)} as {name}, the pattern {_plain(w)}"
                elif isinstance(w, float) and w in self.names:
                    if not isinstance(g, int | float):
                        return f"{_short(have)} takes {_plain(g)} as {name}, the pattern a number"
                elif w != g:
                    return f"{_short(have)} takes {_plain(g)} as {name}, the pattern {_plain(w)}"
        return pairs

    def with_constants(self, nodes: Nodes) -> Found | Miss:
        constants: dict[str, float] = {}
        for want in self.pattern.nodes:
            pairs = zip(full_arguments(want), full_arguments(nodes[want]), strict=True)
            for (_, w), (_, g) in pairs:
                name = self.names.get(w) if isinstance(w, float) else None
                if name is not None and constants.setdefault(name, float(g)) != float(g):
                    return Miss(
                        len(nodes), f"{name} is {constants[name]:g} in one place and {g:g} in another"
                    )
        return Found(nodes, constants)

    def _fail(self, nodes: Nodes, reason: str) -> None:
        """Keep the reason of the attempt that came furthest."""
        if len(nodes) > self.miss.progress:
            self.miss = Miss(len(nodes), reason)


def full_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Name and value of every schema argument, defaults filled in, dimensions counted from the front."""
    if not isinstance(node.target, OpOverload):
        yield from ((f"argument {place}", value) for place, value in enumerate(node.args))
        return
    rank = _rank(node)
    for place, wanted in enumerate(node.target._schema.arguments):
        value = wanted.default_value if wanted.has_default_value() else None
        value = argument(node, place, node.kwargs.get(wanted.name, value))
        if wanted.name in ("dim", "dim0", "dim1", "start_dim", "end_dim") and rank:
            if isinstance(value, int):
                value %= rank
            elif isinstance(value, list | tuple):
                value = [d % rank if isinstance(d, int) else d for d in value]
        yield wanted.name, value


def _rank(node: fx.Node) -> int:
    first = argument(node, 0)
    first = first[0] if isinstance(first, list | tuple) and first else first
    return tensor(first).dim() + (node.target in _ADDS_DIM) if is_tensor(first) else 0


def _short(node: fx.Node) -> str:
    """aten.mul.Tensor -> mul; placeholders by what they are, so that equal reasons of many layers add up."""
    if node.op == "placeholder":
        return "a graph input"
    if node.op == "output":
        return "the graph's output"
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, OpOverload) else "a tuple item"


def _plain(value: Any) -> str:
    return _short(value) if isinstance(value, fx.Node) else str(value).removeprefix("torch.")


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
