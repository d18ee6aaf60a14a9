"""How often each pass must match, counted from the unfused graph and the modules that made it.

The counts look for one tell-tale operator per construct (an RMSNorm has one rsqrt, a gated MLP one activation
that is multiplied), never for a whole pattern, so that a pass which misses a spelling is found out.
"""

from __future__ import annotations

import torch
from torch import fx, nn

aten = torch.ops.aten


def expected_matches(model: nn.Module, graph: fx.Graph) -> dict[str, int]:
    """Pass name -> least number of matches; passes that rewrite nothing countable are absent."""
    counts = {
        "rms_norm": sum(_is_inverse_root(node) for node in graph.nodes),
        "silu_mul": sum(node.target == aten.silu.default and _is_multiplied(node) for node in graph.nodes),
        "gelu_tanh_mul": sum(_is_gelu_tanh(node) and _is_multiplied(node) for node in graph.nodes),
        "rope_kv_write": sum(_is_rotated_write(node) for node in graph.nodes),
        "merge_linears": sum(_parallel_groups(module) for module in model.modules()),
        "fold_qk_norm": sum(_has_head_norms(module) for module in model.modules()),
    }
    return {name: count for name, count in counts.items() if count}


def _is_inverse_root(node: fx.Node) -> bool:
    if node.target == aten.rsqrt.default:
        return True
    return bool(node.target == aten.pow.Tensor_Scalar and node.args[1] == -0.5)


def _is_gelu_tanh(node: fx.Node) -> bool:
    return node.target == aten.gelu.default and node.kwargs.get("approximate") == "tanh"


def _is_multiplied(node: fx.Node) -> bool:
    users = list(node.users)
    return len(users) == 1 and users[0].target == aten.mul.Tensor and isinstance(users[0].args[1], fx.Node)


def _is_rotated_write(node: fx.Node) -> bool:
    """A KV write whose keys depend on a cosine without a linear layer or norm weight between."""
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
        if at.target != aten.linear.default:
            pending.extend(at.all_input_nodes)
    return False


def _parallel_groups(module: nn.Module) -> int:
    children = dict(module.named_children())
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    return sum(all(isinstance(children.get(name), nn.Linear) for name in group) for group in groups)


def _has_head_norms(module: nn.Module) -> bool:
    head_size = getattr(module, "head_dim", None)
    weights = [getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    return all(weight is not None and tuple(weight.shape) == (head_size,) for weight in weights)
