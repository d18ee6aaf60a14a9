"""How often each pass must match, counted from the unfused graph and the modules that made it.

The counts look for one tell-tale per construct (a module that calls itself RMSNorm, an activation that is
multiplied, keys that depend on a cosine), never for a whole pattern: a pass that misses a spelling is found
out.
"""

from __future__ import annotations

import torch
from torch import fx, nn

aten = torch.ops.aten


def expected_matches(model: nn.Module, graph: fx.Graph) -> dict[str, int]:
    """Pass name -> least number of matches; passes that rewrite nothing countable are absent."""
    rotated = sum(_is_rotated_write(node) for node in graph.nodes)
    counts = {
        "rms_norm": sum(_is_weighted_rms_norm(module) for module in model.modules()),
        "silu_mul": sum(node.target == aten.silu.default and _is_multiplied(node) for node in graph.nodes),
        "gelu_tanh_mul": sum(_is_gelu_tanh(node) and _is_multiplied(node) for node in graph.nodes),
        "rope_kv_write": rotated,
        "rope_table": sum(_is_rotary_table(node) for node in graph.nodes) if rotated else 0,
        "merge_linears": _parallel_groups(graph),
        "fold_qk_norm": min(rotated, sum(_has_head_norms(module) for module in model.modules())),
    }
    return {name: count for name, count in counts.items() if count}


def _is_weighted_rms_norm(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__ and isinstance(getattr(module, "weight", None), nn.Parameter)


def _is_gelu_tanh(node: fx.Node) -> bool:
    return node.target == aten.gelu.default and node.kwargs.get("approximate") == "tanh"


def _is_multiplied(node: fx.Node) -> bool:
    users = list(node.users)
    return len(users) == 1 and users[0].target == aten.mul.Tensor and isinstance(users[0].args[1], fx.Node)


def _is_rotary_table(node: fx.Node) -> bool:
    """A cosine of angles that stand in both halves of a row."""
    angles = node.args[0] if node.target == aten.cos.default else None
    if not isinstance(angles, fx.Node) or angles.target != aten.cat.default:
        return False
    parts = angles.args[0]
    return isinstance(parts, list | tuple) and len(parts) == 2 and parts[0] is parts[1]


def _is_rotated_write(node: fx.Node) -> bool:
    """A KV write whose keys depend on a cosine without a linear layer or a norm between."""
    if node.target != torch.ops.ostinato.kv_write.default:
        return False
    pending, seen = [node.args[0]], set()
    while pending:
        at = pending.pop()
        if not isinstance(at, fx.Node) or at in seen:
            continue
        seen.add(at)
        if at.target == aten.cos.default:
            return True
        if at.target not in (aten.linear.default, aten.rsqrt.default):
            pending.extend(at.all_input_nodes)
    return False


def _parallel_groups(graph: fx.Graph) -> int:
    """Values that two or more plain linear layers read, all with a bias or all without."""
    readers: dict[fx.Node, list[int]] = {}
    for node in graph.nodes:
        if node.target == aten.linear.default and node.args[1].meta.get("role") == "weight":
            readers.setdefault(node.args[0], []).append(len(node.args))
    return sum(len(sizes) > 1 and len(set(sizes)) == 1 for sizes in readers.values())


def _has_head_norms(module: nn.Module) -> bool:
    head_size = getattr(module, "head_dim", None)
    weights = [getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    return all(weight is not None and tuple(weight.shape) == (head_size,) for weight in weights)
