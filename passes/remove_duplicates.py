"""Two nodes that compute the same from the same become one.  Numerics: exact.

Nodes that touch memory which the graph writes stay as they are: between two equal reads of a KV plane there
may be a write. Matches are the nodes removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ostinato.passes.aliases import Aliases, is_impure
from ostinato.passes.base import Pass, Tally


class RemoveDuplicates(Pass):
    name = "remove_duplicates"
    numerics = "exact"

    def rewrite(self, graph: fx.Graph, tally: Tally) -> None:
        aliases = Aliases(graph)
        first: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or is_impure(node) or not _is_repeatable(node):
                continue
            if any(aliases.is_written(touched) for touched in [node, *node.all_input_nodes]):
                continue
            key = (node.target, _frozen(node.args), _frozen(node.kwargs))
            same = first.setdefault(key, node)
            if same is not node and tally.accept():
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_repeatable(node: fx.Node) -> bool:
    """Gives the same result each time: no random numbers."""
    return (
        not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _frozen(value: Any) -> Any:
    """A key for an argument; numbers of unlike type differ (1 is not True)."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(value[key])) for key in sorted(value))
    return value if isinstance(value, fx.Node) else (type(value), value)
