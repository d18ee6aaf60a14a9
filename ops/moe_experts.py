"""Mixture of experts with gated SiLU: sum over a token's k experts of weight * down(silu(gate(x)) * up(x)).

Shapes: T tokens, D model width, E experts, F expert width, K experts per token.  gate_up is [E, 2F, D] (gate
rows first), down is [E, D, F], topk_index int64 [T, K] in 0..E (E: no expert), topk_weight [T, K].
Types: fp16, bf16, fp32 (reference also fp64); topk_weight in that type or fp32.  Rounding: products and the
sum over experts in the input type, in expert order.  A CPU op so far: it reads the index, so no graph could
capture it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.check import FLOATS, check_scale_type, check_shapes, check_types


def moe_experts_reference(
    x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    out = torch.zeros_like(x_TD)
    for expert in torch.unique(index_TK).tolist():
        if expert >= gate_up.shape[0]:
            continue
        token, place = torch.where(index_TK == expert)
        gate, up = F.linear(x_TD[token], gate_up[expert]).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, down[expert]) * weight_TK[token, place, None]
        out.index_add_(0, token, made.to(out.dtype))
    return out


def _check(x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> None:
    op = "moe_experts"
    check_shapes(
        op,
        x=(x_TD, "T D"),
        topk_index=(index_TK, "T K"),
        topk_weight=(weight_TK, "T K"),
        gate_up=(gate_up, "E 2F D"),
        down=(down, "E D F"),
    )
    check_types(op, FLOATS, x=x_TD, gate_up=gate_up, down=down)
    check_types(op, (torch.int64,), topk_index=index_TK)
    check_scale_type(op, "x", x_TD, "topk_weight", weight_TK)
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise ValueError(
            f"{op}: gate_up has {gate_up.shape[1]} rows per expert and down {down.shape[2]} columns; "
            "the first must be twice the second"
        )


def _on_cpu(x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    _check(x_TD, index_TK, weight_TK, gate_up, down)
    return moe_experts_reference(x_TD, index_TK, weight_TK, gate_up, down)


torch.library.define(
    "ostinato::moe_experts",
    "(Tensor x, Tensor topk_index, Tensor topk_weight, Tensor gate_up, Tensor down) -> Tensor",
)
torch.library.impl("ostinato::moe_experts", "CPU", _on_cpu)


@torch.library.register_fake("ostinato::moe_experts")
def _fake(x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    _check(x_TD, index_TK, weight_TK, gate_up, down)
    return torch.empty_like(x_TD)


OP = torch.ops.ostinato.moe_experts.default
