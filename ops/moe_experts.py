"""Mixture of experts with gated SiLU: sum over a token's k experts of weight * down(silu(gate(x)) * up(x)).

Shapes: T tokens, D model width, E experts, F expert width, K experts per token.  gate_up is [E, 2F, D] (gate
rows first), down is [E, D, F], topk_index int64 [T, K] in 0..E (E: no expert), topk_weight [T, K].
Types: fp16, bf16, fp32.  Rounding: products and the sum over experts in the input type, in expert order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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


torch.library.define(
    "ostinato::moe_experts",
    "(Tensor x, Tensor topk_index, Tensor topk_weight, Tensor gate_up, Tensor down) -> Tensor",
)
torch.library.impl("ostinato::moe_experts", "CPU", moe_experts_reference)


@torch.library.register_fake("ostinato::moe_experts")
def _fake(x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return torch.empty_like(x_TD)


OP = torch.ops.ostinato.moe_experts.default
