"""What every pass has: a name, a numeric class, what it needs, and a report.

A pass that walks the graph derives from `Pass`; one that replaces a pattern by an op derives from
`FusionPass` (fusion.py) and holds no plumbing at all.
"""

from __future__ import annotations

import abc
import time
from collections import Counter
from typing import ClassVar, Literal, NamedTuple

from torch import fx

from ostinato.errors import CompileError
from ostinato.passes.proof import Proof


class PassReport(NamedTuple):
    """What one pass did. `refused` maps a reason to a number of places; the pipeline sets `expected`."""

    name: str
    matched: int
    refused: dict[str, int]
    seconds: float
    proofs: tuple[Proof, ...] = ()
    expected: int | None = None


class Fuel:
    """How many more matches all passes together may make; -1: no limit."""

    def __init__(self, limit: int = -1) -> None:
        self.left = limit

    def take(self) -> bool:
        """Use up one match; False when none is left."""
        if self.left == 0:
            return False
        self.left -= self.left > 0
        return True


class Tally:
    """The books of one run of one pass."""

    def __init__(self, fuel: Fuel, *, proves: bool) -> None:
        self.proves = proves
        self.matched = 0
        self.refused: Counter[str] = Counter()
        self.proofs: list[Proof] = []
        self._fuel = fuel

    @property
    def is_dry(self) -> bool:
        return self._fuel.left == 0

    def accept(self) -> bool:
        """Count a match that is about to be made; False when the fuel is used up and it must not be made."""
        taken = self._fuel.take()
        self.matched += taken
        return taken

    def prove(self, name: str, anchor: fx.Node, proof: Proof) -> None:
        """Keep a proof of pass `name`; CompileError if it failed."""
        self.proofs.append(proof)
        if not proof.ok:
            raise CompileError(
                f"pass {name} at node {anchor.name} ({proof.description}): error {proof.max_error:.3g} is "
                f"over the budget of {proof.budget:.3g}; report this, and use passes.off={name} meanwhile"
            )

    def refuse(self, reason: str) -> None:
        """Count a place that looked like a match and is none. A reason names no node: equal ones add up."""
        self.refused[reason] += 1


class Pass(abc.ABC):
    """One graph rewrite, in place."""

    name: ClassVar[str]  # the word in config, logs and reports
    numerics: ClassVar[Literal["exact", "close"]]  # exact: bit-equal results; close: within the error budget
    needs: ClassVar[
        tuple[str, ...]
    ] = ()  # passes without which this one finds nothing; with one off, none is expected

    def __call__(
        self, graph_module: fx.GraphModule, *, fuel: Fuel | None = None, proves: bool = True
    ) -> PassReport:
        """Rewrite `graph_module` so that it can be run again at once."""
        report = self.run(graph_module.graph, fuel=fuel or Fuel(), proves=proves)
        graph_module.recompile()
        return report

    def run(self, graph: fx.Graph, *, fuel: Fuel, proves: bool = True) -> PassReport:
        """Rewrite `graph`. Raises CompileError when a rewrite does not prove to be right (see proof.py)."""
        start = time.perf_counter()
        tally = Tally(fuel, proves=proves)
        self.rewrite(graph, tally)
        if tally.matched:
            graph.lint()
        seconds = time.perf_counter() - start
        return PassReport(self.name, tally.matched, dict(tally.refused), seconds, tuple(tally.proofs))

    @abc.abstractmethod
    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        """Change `graph`; ask `tally.accept()` before each match and tell it every refusal and proof."""
