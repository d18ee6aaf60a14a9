"""Readable graphs before and after each pass: `03_silu_mul.before.py`, `03_silu_mul.after.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import fx


class Dump:
    """Writes into `folder`, which is made if missing; files of an earlier run are overwritten."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ops: Counter[str] = Counter()

    def before(self, place: int, name: str, graph_module: fx.GraphModule) -> None:
        self._ops = _count(graph_module)
        self._write(place, name, "before", graph_module, [])

    def after(self, place: int, name: str, graph_module: fx.GraphModule) -> None:
        """As `before`, headed by the operators whose number changed."""
        ops = _count(graph_module)
        changed = sorted(op for op in ops | self._ops if ops[op] != self._ops[op])
        header = [f"# {op}: {self._ops[op]} -> {ops[op]}" for op in changed] or ["# nothing changed"]
        self._write(place, name, "after", graph_module, header)

    def _write(
        self, place: int, name: str, when: str, graph_module: fx.GraphModule, header: list[str]
    ) -> None:
        code = graph_module.print_readable(print_output=False)
        (self.folder / f"{place:02}_{name}.{when}.py").write_text("\n".join([*header, code]) + "\n")


def _count(graph_module: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
