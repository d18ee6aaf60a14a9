"""Causal attention of a step's new tokens over the paged cache: prefill, decode and both at once.

Shapes: T new tokens, H query heads, G KV heads (H % G == 0; head h reads KV head h // (H/G)), D and E sizes
of a K and a V head, N blocks, B tokens of a block, S sequences, M table width.  q [T, H, D] -> [T, H, E],
contiguous; planes [N, B, G, D] and [N, B, G, E] with any strides; block_tables [S, M]; seq_lens [S] counts
the tokens of a sequence with those of this step, which are already in the cache; query_start [S + 1],
tokens query_start[s] .. query_start[s + 1] of q are the last ones of sequence s.  Indices are int32 or
int64.
The key at position j is visible to the query at i iff j <= i, and i - window < j if window > 0.  Scores are
scale * q.k; if softcap > 0 they become softcap * tanh(scores / softcap).  sinks [H] are, if given, one more
score of each head, taken as it is, that has a share of the softmax and no value.
Only blocks that hold visible keys are read: table entries before a window or past a sequence may be
anything, and a plane may be a view over address space that is mapped in part.  Rows of q past
query_start[S], and tokens that seq_lens does not cover, give zeros.
On a GPU, a step of one token per sequence is one launch (paged_decode); in others, sequences of one token
are, and the rest is another launch (paged_prefill, wgmma_prefill).  Where it was measured to be faster, a
library does all of it (attention_choice).
Types: fp16, bf16, fp32, fp64, q and planes alike; sinks in that type or float32.
Rounding: scores and softmax in float32, one rounding of the output.
Sources: arXiv:1706.03762, arXiv:2309.06180 (paged cache), arXiv:2112.05682 (online softmax).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops import attention_choice, fa3_attention, wgmma_prefill
from ostinato.ops.check import (
    FLOATS,
    INTEGERS,
    check_dense_planes,
    check_device,
    check_scale_type,
    check_shapes,
    check_types,
)
from ostinato.ops.launch import KERNEL_FLOATS
from ostinato.ops.paged_decode import decode
from ostinato.ops.paged_prefill import prefill


def paged_attention_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    block_tokens = k_cache.shape[1]
    out_THE = q_THD.new_zeros((q_THD.shape[0], q_THD.shape[1], v_cache.shape[3]))
    starts, lengths = query_start.tolist(), seq_lens_S.tolist()
    for row, (first, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        num_new = min(stop - first, length)
        if num_new <= 0:
            continue
        oldest = max(0, length - num_new - window + 1) if window > 0 else 0  # key that any query sees
        first_block = oldest // block_tokens
        blocks = block_tables_SM[row, first_block : -(-length // block_tokens)].long()
        base = first_block * block_tokens
        k, v = (plane[blocks].flatten(0, 1)[oldest - base : length - base] for plane in (k_cache, v_cache))
        q = q_THD[stop - num_new : stop]
        out_THE[stop - num_new : stop] = _attend(q, k, v, scale, window, softcap, sinks_H)
    return out_THE


def _attend(
    q_nHD: Tensor,
    k_LGD: Tensor,
    v_LGE: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """One sequence: n queries, which belong to the last n of L keys."""
    num_new, num_keys, kv_heads = len(q_nHD), len(k_LGD), k_LGD.shape[1]
    # the KV head is the batch, so that strides share K and V: q [G, H/G, n, D], k and v [G, 1, L, .]
    q = q_nHD.reshape(num_new, kv_heads, -1, q_nHD.shape[2]).permute(1, 2, 0, 3)
    k, v = (kv.permute(1, 0, 2)[:, None] for kv in (k_LGD, v_LGE))
    by_library = not softcap and sinks_H is None
    if num_new == 1 and by_library:  # every key is visible: the H/G heads are queries of one head
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, scale=scale).transpose(1, 2)
        return out.permute(2, 0, 1, 3).flatten(1, 2)
    k, v = (kv.expand(-1, q.shape[1], -1, -1) for kv in (k, v))
    if num_new == num_keys and not 0 < window < num_keys and by_library:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)
    at_query = torch.arange(num_keys - num_new, num_keys, device=q.device)[:, None]
    at_key = torch.arange(num_keys, device=q.device)
    visible = at_key <= at_query
    if window > 0:
        visible &= at_key > at_query - window
    if by_library:
        out = F.scaled_dot_product_attention(q, k, v, visible, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks_H is not None:
        sink = sinks_H.to(wide).view(kv_heads, -1, 1, 1).expand(-1, -1, num_new, -1)
        scores = torch.cat([scores, sink], -1)
    out = (scores.softmax(-1)[..., :num_keys] @ v.to(wide)).to(q.dtype)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _check(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
) -> None:
    op = "paged_attention"
    sinks = {} if sinks_H is None else {"sinks": (sinks_H, "H")}
    check_shapes(
        op,
        q=(q_THD, "T H D"),
        k_cache=(k_cache, "N B G D"),
        v_cache=(v_cache, "N B G E"),
        block_tables=(block_tables_SM, "S M"),
        seq_lens=(seq_lens_S, "S"),
        query_start=(query_start, "Q"),
        **sinks,
    )
    heads, kv_heads = q_THD.shape[1], k_cache.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"{op}: q has {heads} heads and k_cache {kv_heads}; the first must be a multiple of the second"
        )
    num_seqs, num_starts = seq_lens_S.shape[0], query_start.shape[0]
    if isinstance(num_seqs, int) and isinstance(num_starts, int) and num_starts != num_seqs + 1:
        raise ValueError(
            f"{op}: query_start has {num_starts} entries for {num_seqs} seq_lens; it needs one more"
        )
    if window < 0 or softcap < 0:
        raise ValueError(f"{op}: window={window}, softcap={softcap}; both must be positive, or 0 for none")
    if scale <= 0:
        raise ValueError(f"{op}: scale={scale}; it must be positive")
    if sinks_H is not None:
        check_scale_type(op, "q", q_THD, "sinks", sinks_H)
    check_types(op, FLOATS, q=q_THD, k_cache=k_cache, v_cache=v_cache)
    for name, index in (
        ("block_tables", block_tables_SM),
        ("seq_lens", seq_lens_S),
        ("query_start", query_start),
    ):
        check_types(op, INTEGERS, **{name: index})
        check_device(op, "q", q_THD, name, index)


def _on_cpu(*args: Any) -> Tensor:
    _check(*args)
    return paged_attention_reference(*args)


def _launch(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
    *,
    choices: attention_choice.Choices | None = None,
) -> Tensor:
    """`choices`: of an artifact, instead of the rule below."""
    _check(q_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_start, scale, window, softcap, sinks_H)
    check_types("paged_attention", KERNEL_FLOATS, q=q_THD)
    check_dense_planes("paged_attention", k_cache=k_cache, v_cache=v_cache)
    num_tokens, num_seqs = q_THD.shape[0], seq_lens_S.shape[0]
    out = q_THD.new_empty((num_tokens, q_THD.shape[1], v_cache.shape[3]))
    if out.numel() == 0 or block_tables_SM.numel() == 0:
        return out.zero_()
    inputs = q_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_start, sinks_H
    way = attention_choice.chosen(choices, *inputs[:3], num_seqs, window, softcap, sinks_H)
    if way == "fa3":
        fa3_attention.launch(*inputs[:6], out, scale)
        return out
    if num_tokens <= num_seqs:
        decode(*inputs, out, scale, window, softcap, singles_only=False)
        return out
    is_mixed = num_seqs > 1  # a lone sequence is one tile of the second kernel
    if is_mixed:
        decode(*inputs, out, scale, window, softcap, singles_only=True)
    min_new = 2 if is_mixed else 1
    takes_tiles = wgmma_prefill.can_launch(q_THD, k_cache, v_cache, window, softcap, sinks_H)
    if takes_tiles and way != "triton":
        wgmma_prefill.launch(*inputs[:6], out, scale, min_new=min_new)
    else:
        prefill(*inputs, out, scale, window, softcap, min_new=min_new)
    return out


torch.library.define(
    "ostinato::paged_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, Tensor query_start, "
    "float scale, int window, float softcap, Tensor? sinks=None) -> Tensor",
)
torch.library.impl("ostinato::paged_attention", "CPU", _on_cpu)
torch.library.impl("ostinato::paged_attention", "CUDA", _launch)


@torch.library.register_fake("ostinato::paged_attention")
def _fake(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    _check(q_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_start, scale, window, softcap, sinks_H)
    return q_THD.new_empty((q_THD.shape[0], q_THD.shape[1], v_cache.shape[3]))


OP = torch.ops.ostinato.paged_attention.default
