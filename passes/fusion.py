"""A pass that replaces a pattern of nodes by an op. It states what to find and what to put there, and nothing else.

Unlike a list of patterns with all their numbers, a pass looks at one anchor node at a time and offers the spellings
that its surroundings allow: types and sizes come from the graph, constants such as eps are captured, and a place that
fits no spelling is refused with what differs.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ostinato.errors import CompileError
from ostinato.passes.aliases import Aliases, is_impure
from ostinato.passes.base import Pass, Tally
from ostinato.passes.matcher import Found, Miss, find
from ostinato.passes.proof import Proof, extract, in_float64, prove
from ostinato.passes.trace import Example, trace
from ostinato.passes.values import (
    Values,
    concrete_shape,
    copy_origin,
    is_tensor,
    same_layout,
    same_shape,
    tensor,
)


class Spelling(NamedTuple):
    """One way in which a model may write the pattern.

    `pattern` and `replacement` take the names of `examples` as arguments: a tensor example (its type and its literal
    sizes count) is an input, a float one (each another value) a constant that is read from the graph.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: dict[str, Example]
    ends: tuple[fx.Node | None, ...] = ()  # graph nodes of the pattern's outputs, where known
    shared: tuple[str, ...] = ()  # inputs whose preparation other nodes may use too (rotary tables)
    proof_inputs: dict[
        str, Callable[[Tensor], Tensor]
    ] = {}  # make a random input one that the model can meet


class Match(NamedTuple):
    """A place where a spelling was found."""

    anchor: fx.Node
    spelling: Spelling
    inputs: dict[str, fx.Node]
    constants: dict[str, float]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]  # in graph order

    def value(self, name: str) -> Tensor:
        """The fake tensor of an input."""
        return tensor(self.inputs[name])


class FusionPass(Pass):
    """Subclasses give `anchors` and `spellings`, and `check` where fitting nodes are not enough."""

    anchors: ClassVar[tuple[OpOverload, ...]]  # operators of which one belongs to each possible match

    @abc.abstractmethod
    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str | None:
        """Spellings to try at `anchor`, best first; a reason to refuse it; None if it is none of this pass's business."""

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
            return _second_user(match, found, aliases) or self.check(match) or match
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
        reason = _order(match, point)
        if reason:
            return reason
        fresh, outputs = self._insert(graph, match, point, values)
        reason = next(filter(None, map(_type_differs, match.outputs, outputs)), None)
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
        return None

    def _insert(
        self, graph: fx.Graph, match: Match, point: fx.Node, values: Values
    ) -> tuple[list[fx.Node], tuple[fx.Node, ...]]:
        """Copy the replacement in front of `point`, with the captured constants; return its nodes and outputs."""
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
        inputs = {
            node: name for name, node in reversed(match.inputs.items())
        }  # a node that serves twice comes once
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
        tally.proofs.append(proof)
        require(self.name, match.anchor, proof)


def _unchanged(value: Tensor) -> Tensor:
    return value


def require(name: str, anchor: fx.Node, proof: Proof) -> None:
    """Raise CompileError for a proof that failed."""
    if not proof.ok:
        raise CompileError(
            f"pass {name} at node {anchor.name} ({proof.description}): error {proof.max_error:.3g} is over the budget "
            f"of {proof.budget:.3g}; report this, and compile with passes.off={name} until it is mended"
        )


def _second_user(match: Match, found: Found, aliases: Aliases) -> str | None:
    """A reason if a node inside the match is needed outside, or if an input is written while the match computes."""
    own = set(match.nodes)
    private = {
        name: node for name, node in match.inputs.items() if name not in match.spelling.shared
    }.values()
    depends: set[fx.Node] = set(private)
    for node in match.nodes:
        if any(source in depends for source in node.all_input_nodes):
            depends.add(node)
        if node in match.outputs or node not in depends:
            continue
        if any(user not in own for user in node.users):
            return f"the intermediate result of {_name(node)} is used elsewhere too"
    writer = aliases.writer_between(match.nodes[0], match.nodes[-1], list(match.inputs.values()), own)
    return f"{_name(writer)} writes an input in between" if writer is not None else None


def _order(match: Match, point: fx.Node) -> str | None:
    """A reason if a new node at `point` would stand before one of its inputs, or after one of its users."""
    if any(point < node for node in match.inputs.values() if node.op != "placeholder"):
        return "an input is computed after the result is used"
    own = set(match.nodes)
    if any(user not in own and user < point for old in match.outputs for user in old.users):
        return "a result is used before the fused op can run"
    return None


def _type_differs(old: fx.Node, new: fx.Node) -> str | None:
    was, now = tensor(old), tensor(new)
    if was.dtype != now.dtype:
        return f"the graph's result is {was.dtype}, the op would give {now.dtype}".replace("torch.", "")
    return None if same_shape(was, now) else "the op would give another shape"


def _name(node: fx.Node) -> str:
    return (
        node.target._schema.name.split("::")[-1] if isinstance(node.target, OpOverload) else str(node.target)
    )


def example(node: fx.Node) -> Tensor:
    """A tensor of the node's type and sizes for tracing a pattern; symbols become small numbers."""
    assert is_tensor(node), f"{node.name} makes no single tensor"
    return torch.empty(concrete_shape(tensor(node), {}), dtype=tensor(node).dtype)
