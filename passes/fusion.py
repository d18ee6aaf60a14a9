"""A pass that replaces a pattern of nodes by an op. It states what to find and what to put there, no more.

Unlike a list of patterns with all their numbers, a pass looks at one anchor node at a time and offers the
spellings that its surroundings allow: types, sizes and constants such as eps come from the graph, and a place
that fits no spelling is refused with what differs.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ostinato.passes.aliases import Aliases, is_impure
from ostinato.passes.base import Pass, Tally
from ostinato.passes.match import Match, Spelling, conflict, misplaced, type_differs
from ostinato.passes.matcher import Miss, find
from ostinato.passes.proof import extract, in_float64, prove
from ostinato.passes.trace import trace
from ostinato.passes.values import Values, concrete_shape, copy_origin, same_layout, tensor


class FusionPass(Pass):
    """Subclasses give `anchors` and `spellings`, and `check` where fitting nodes are not enough."""

    anchors: ClassVar[tuple[OpOverload, ...]]  # operators of which one belongs to each possible match

    @abc.abstractmethod
    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str | None:
        """Spellings to try at `anchor`, best first; a reason to refuse it; None: no business of this pass."""

    def check(self, match: Match) -> str | None:
        """None accepts the match; a string refuses it and is counted."""
        return None

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        aliases, values = Aliases(graph), Values()
        proven: set[Any] = set()
        gone: set[fx.Node] = set()
        for anchor in [node for node in graph.nodes if node.target in self.anchors]:
            if tally.is_dry or anchor in gone:
                continue
            match = self._match(anchor, aliases)
            if isinstance(match, Match):
                match = self._replace(graph, match, tally, values, proven, gone)
            if isinstance(match, str):
                tally.refuse(match)

    def _match(self, anchor: fx.Node, aliases: Aliases) -> Match | str | None:
        spellings = self.spellings(anchor)
        if spellings is None or isinstance(spellings, str):
            return spellings
        best = Miss(-1, "no spelling applies")
        for spelling in spellings:
            traced = trace(spelling.pattern, spelling.examples, key=spelling.pattern)
            constants = {name: e for name, e in spelling.examples.items() if not isinstance(e, Tensor)}
            found = find(traced, anchor, constants=constants, ends=spelling.ends)
            if isinstance(found, Miss):
                best = max(best, found, key=lambda miss: miss.progress)
                continue
            match = Match(
                anchor,
                spelling,
                {name: found.nodes[node] for name, node in traced.inputs.items()},
                found.constants,
                tuple(found.nodes[node] for node in traced.outputs),
                tuple(sorted(found.nodes[node] for node in traced.nodes)),
            )
            return conflict(match, aliases) or self.check(match) or match
        return best.reason

    def _replace(
        self,
        graph: fx.Graph,
        match: Match,
        tally: Tally,
        values: Values,
        proven: set[Any],
        gone: set[fx.Node],
    ) -> str | None:
        point = next((node for node in match.nodes if is_impure(node)), min(match.outputs))
        reason = misplaced(match, point)
        if reason:
            return reason
        fresh, outputs = self._insert(graph, match, point, values)
        reason = next(filter(None, map(type_differs, match.outputs, outputs)), None)
        if reason or not tally.accept():
            for node in reversed(fresh):
                graph.erase_node(node)
            return reason
        if tally.proves:
            self._prove(match, fresh, outputs, tally, proven)
        changed = []
        for old, new in zip(match.outputs, outputs, strict=True):
            if not same_layout(old.meta["val"], new.meta["val"]):
                changed += list(old.users)
            old.replace_all_uses_with(new)
        for node in reversed(match.nodes):
            if not node.users:
                graph.erase_node(node)
                gone.add(node)
        values.refresh(node for node in changed if node not in gone)
        for node in reversed(fresh):
            if not node.users and not is_impure(node):
                graph.erase_node(node)
        return None

    def _insert(
        self, graph: fx.Graph, match: Match, point: fx.Node, values: Values
    ) -> tuple[list[fx.Node], tuple[fx.Node, ...]]:
        """Copy the replacement, with the captured constants, to `point`; return its nodes and outputs."""
        traced = trace(match.spelling.replacement, match.spelling.examples, key=match.spelling.replacement)
        numbers = {match.spelling.examples[name]: value for name, value in match.constants.items()}
        copies = {node: match.inputs[name] for name, node in traced.inputs.items()}
        fresh = []
        with graph.inserting_before(point):
            for node in traced.nodes:
                copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
                copy.args = tuple(numbers.get(a, a) if isinstance(a, float) else a for a in copy.args)
                copy.meta = {}
                copy_origin(match.anchor, copy)
                values.compute(copy)
                fresh.append(copy)
        return fresh, tuple(copies[node] for node in traced.outputs)

    def _prove(
        self,
        match: Match,
        fresh: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        tally: Tally,
        proven: set[Any],
    ) -> None:
        """Run old and new nodes on random inputs, once per spelling, set of sizes and constants."""
        sizes: dict[Any, int] = {}
        # a node that serves as two inputs comes once
        inputs = {node: name for name, node in reversed(match.inputs.items())}
        shapes = {name: concrete_shape(tensor(node), sizes) for node, name in inputs.items()}
        types = tuple(tensor(node).dtype for node in inputs)
        key = (match.spelling.pattern, match.spelling.replacement, tuple(shapes.items()), types,
               tuple(match.constants.items()))  # fmt: skip
        if key in proven:
            return
        proven.add(key)
        seed = torch.Generator().manual_seed(len(proven))
        samples = []
        for node, name in inputs.items():
            sample = torch.randn(shapes[name], generator=seed).to(tensor(node).dtype)
            samples.append(match.spelling.proof_inputs.get(name, _unchanged)(sample))
        plain = extract(match.nodes, list(inputs), match.outputs)
        fused = extract(fresh, list(inputs), outputs)
        parts = [f"{name} {list(shape)}" for name, shape in shapes.items()]
        parts += [f"{name}={value:g}" for name, value in match.constants.items()]
        kind = str(types[0]).removeprefix("torch.")
        truth = None if self.numerics == "exact" else in_float64(plain)
        proof = prove(plain, fused, samples, truth=truth, description=f"{kind}: {', '.join(parts)}")
        tally.prove(self.name, match.anchor, proof)


def _unchanged(value: Tensor) -> Tensor:
    return value
