"""Attention inside each sequence of a step, without a cache: what an encoder does, and a decoder that embeds.

Shapes: T tokens of all sequences one after another, H query heads, G KV heads (H % G == 0; head h reads KV
head h // (H/G)), D and E sizes of a K and a V head, S sequences.  q [T, H, D], k [T, G, D], v [T, G, E] ->
[T, H, E], contiguous; query_start [S + 1], int32 or int64: tokens query_start[s] .. query_start[s + 1] are
sequence s, and the last entry is T.
The key at j is visible to the query at i of the same sequence iff j <= i or not causal, and |i - j| < window
or window is 0.  Scores are scale * q.k; if softcap > 0 they become softcap * tanh(scores / softcap).
query_start is read on the host: keep it in host memory, also on a GPU, where each read would wait for the
device.  No graph can capture this op.
Types: fp16, bf16, fp32, fp64, all alike.  Rounding: scores and softmax in float32, one rounding of the
output; without window and softcap as torch's scaled_dot_product_attention does it, one call for each
sequence.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.check import FLOATS, INTEGERS, check_shapes, check_types


def varlen_attention_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    query_start: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    out_THE = q_THD.new_empty((q_THD.shape[0], q_THD.shape[1], v_TGE.shape[2]))
    for first, stop in pairwise(query_start.tolist()):
        q, k, v = (part[first:stop].transpose(0, 1) for part in (q_THD, k_TGD, v_TGE))
        out_THE[first:stop] = _attend(q, k, v, scale, causal, window, softcap).transpose(0, 1)
    return out_THE


def _attend(
    q_HND: Tensor, k_GND: Tensor, v_GNE: Tensor, scale: float, causal: bool, window: int, softcap: float
) -> Tensor:
    """Attention of one sequence of N tokens."""
    wide = torch.promote_types(q_HND.dtype, torch.float32)
    group = q_HND.shape[0] // k_GND.shape[0]
    k, v = (part.to(wide).repeat_interleave(group, 0) for part in (k_GND, v_GNE))
    scores = q_HND.to(wide) @ k.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(scores.shape[1], device=scores.device)
    apart = at[:, None] - at[None, :]
    hidden = torch.zeros_like(apart, dtype=torch.bool)
    if causal:
        hidden |= apart < 0
    if window > 0:
        hidden |= apart.abs() >= window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).to(q_HND.dtype)


def _launch(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    query_start: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """One call of torch's SDPA for each sequence, on any device; the reference where SDPA cannot do it."""
    _check(q_THD, k_TGD, v_TGE, query_start)
    out_THE = q_THD.new_empty((q_THD.shape[0], q_THD.shape[1], v_TGE.shape[2]))
    shares = q_THD.shape[1] != k_TGD.shape[1]
    for first, stop in pairwise(query_start.tolist()):
        q, k, v = (part[first:stop].transpose(0, 1) for part in (q_THD, k_TGD, v_TGE))
        if softcap > 0 or 0 < window < stop - first:
            made = _attend(q, k, v, scale, causal, window, softcap)
        else:
            made = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=causal, scale=scale, enable_gqa=shares
            )[0]
        out_THE[first:stop] = made.transpose(0, 1)
    return out_THE


def _check(q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, query_start: Tensor) -> None:
    op = "varlen_attention"
    check_shapes(op, q=(q_THD, "T H D"), k=(k_TGD, "T G D"), v=(v_TGE, "T G E"))
    check_shapes(op, query_start=(query_start, "S+1"))
    check_types(op, FLOATS, q=q_THD, k=k_TGD, v=v_TGE)
    check_types(op, INTEGERS, query_start=query_start)
    if q_THD.shape[1] % k_TGD.shape[1]:
        raise ValueError(
            f"{op}: {q_THD.shape[1]} query heads cannot share {k_TGD.shape[1]} KV heads; "
            "the first must be a multiple of the second"
        )


torch.library.define(
    "ostinato::varlen_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor query_start, float scale, bool causal, int window, float softcap) "
    "-> Tensor",
)
torch.library.impl("ostinato::varlen_attention", "CUDA", _launch)
torch.library.impl("ostinato::varlen_attention", "CPU", _launch)


@torch.library.register_fake("ostinato::varlen_attention")
def _fake(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    query_start: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    _check(q_THD, k_TGD, v_TGE, query_start)
    return q_THD.new_empty((q_THD.shape[0], q_THD.shape[1], v_TGE.shape[2]))


OP = torch.ops.ostinato.varlen_attention.default
