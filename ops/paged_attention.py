"""Causal attention of a step's new tokens over the paged cache: prefill, decode and both at once.

Shapes: T new tokens, H query heads, G KV heads (H % G == 0; head h reads KV head h // (H/G)), D and E sizes
of a K and a V head, N blocks, B tokens of a block, S sequences, M table width.  q [T, H, D] -> [T, H, E],
contiguous; planes [N, B, G, D] and [N, B, G, E] with any strides; block_tables [S, M]; seq_lens [S] counts
the tokens of a sequence with those of this step, which are already in the cache; query_start [S + 1],
tokens query_start[s] .. query_start[s + 1] of q are the last ones of sequence s.  Indices are int32 or
int64.
The key at position j is visible to the query at i iff j <= i, and i - window < j if window > 0.  Scores are
scale * q.k; if softcap > 0 they become softcap * tanh(scores / softcap).
Only blocks that hold visible keys are read: table entries before a window or past a sequence may be
anything, and a plane may be a view over address space that is mapped in part.  Rows of q past
query_start[S], and tokens that seq_lens does not cover, give zeros.
Types: fp16, bf16, fp32, fp64, q and planes alike.  Rounding: scores and softmax in float32, one rounding of
the output.
Sources: arXiv:1706.03762, arXiv:2309.06180 (paged cache), arXiv:2112.05682 (online softmax).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.check import FLOATS, INTEGERS, check_dense_planes, check_device, check_shapes, check_types
from ostinato.ops.launch import (
    KERNEL_FLOATS,
    as_rows,
    ceil_to_power_of_2,
    jit,
    on_device,
    tl,
    with_dense_heads,
)


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
        out_THE[stop - num_new : stop] = _attend(q_THD[stop - num_new : stop], k, v, scale, window, softcap)
    return out_THE


def _attend(q_nHD: Tensor, k_LGD: Tensor, v_LGE: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """One sequence: n queries, which belong to the last n of L keys."""
    num_new, num_keys, kv_heads = len(q_nHD), len(k_LGD), k_LGD.shape[1]
    # the KV head is the batch, so that strides share K and V: q [G, H/G, n, D], k and v [G, 1, L, .]
    q = q_nHD.reshape(num_new, kv_heads, -1, q_nHD.shape[2]).permute(1, 2, 0, 3)
    k, v = (kv.permute(1, 0, 2)[:, None] for kv in (k_LGD, v_LGE))
    if num_new == 1 and not softcap:  # every key is visible: the H/G heads are queries of one head
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, scale=scale).transpose(1, 2)
        return out.permute(2, 0, 1, 3).flatten(1, 2)
    k, v = (kv.expand(-1, q.shape[1], -1, -1) for kv in (k, v))
    if num_new == num_keys and not 0 < window < num_keys and not softcap:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)
    at_query = torch.arange(num_keys - num_new, num_keys, device=q.device)[:, None]
    at_key = torch.arange(num_keys, device=q.device)
    visible = at_key <= at_query
    if window > 0:
        visible &= at_key > at_query - window
    if softcap:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = softcap * torch.tanh(q.to(wide) @ k.to(wide).mT * (scale / softcap))
        out = (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v.to(wide)).to(q.dtype)
    else:
        out = F.scaled_dot_product_attention(q, k, v, visible, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


@jit
def _tanh(x):  # type: ignore[no-untyped-def]  # Triton
    """Exact to float32; 1 - 2 / (exp(2x) + 1) alone would lose the leading digits of a small x."""
    z = x * x
    small = x * (1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@jit(do_not_specialize=["num_tokens", "num_seqs", "table_stride"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    query_start,
    out,
    scale,
    softcap,
    num_tokens,
    num_seqs,
    table_stride,
    q_stride_t,
    q_stride_h,
    k_stride_n,
    k_stride_b,
    k_stride_g,
    v_stride_n,
    v_stride_b,
    v_stride_g,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
):
    """QUERIES tokens of one sequence and the GROUP query heads of one KV head: a tile of BLOCK_M query rows.

    Sequence s has the tiles from query_start[s] // QUERIES + s on, which leaves room for
    ceil(tokens / QUERIES) of them before sequence s + 1; so the host sizes the grid without lengths.
    The rows past the last sequence are handled as one more sequence, of length 0.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    begun = tl.zeros([256], tl.int32)
    for start in range(0, num_seqs + 1, 256):
        each = start + tl.arange(0, 256)
        first = tl.load(query_start + each, mask=each <= num_seqs, other=0).to(tl.int32)
        begun += ((each <= num_seqs) & (first // QUERIES + each <= tile)).to(tl.int32)
    seq = tl.sum(begun, 0) - 1
    seq_first = tl.load(query_start + seq).to(tl.int32)
    seq_stop = tl.load(query_start + seq + 1, mask=seq < num_seqs, other=num_tokens).to(tl.int32)
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    tile_first = seq_first + (tile - seq_first // QUERIES - seq) * QUERIES
    if tile_first >= seq_stop:
        return

    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    token = tile_first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    position = length - seq_stop + token
    live = (m // GROUP < QUERIES) & (token < seq_stop)
    q_at = q + token.to(tl.int64)[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
    queries = tl.load(q_at, mask=live[:, None] & (d[None, :] < D), other=0.0)
    if FLOAT32_DOT:
        queries = queries.to(tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    key_stop = length - seq_stop + tl.minimum(tile_first + QUERIES, seq_stop)
    key_first = 0
    if WINDOW > 0:  # blocks before it may have been freed
        key_first = tl.maximum(length - seq_stop + tile_first - WINDOW + 1, 0)
    table = block_tables + seq.to(tl.int64) * table_stride
    k_plane = k_cache + kv_head.to(tl.int64) * k_stride_g
    v_plane = v_cache + kv_head.to(tl.int64) * v_stride_g
    for start in range(key_first, key_stop, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < key_stop
        block = tl.load(table + n // B, mask=there, other=0).to(tl.int64)
        k_at = k_plane + (block * k_stride_n + (n % B) * k_stride_b)[None, :] + d[:, None]
        v_at = v_plane + (block * v_stride_n + (n % B) * v_stride_b)[:, None] + e[None, :]
        keys = tl.load(k_at, mask=there[None, :] & (d[:, None] < D), other=0.0)
        values = tl.load(v_at, mask=there[:, None] & (e[None, :] < E), other=0.0)
        if FLOAT32_DOT:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        visible = there[None, :] & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= n[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no visible key yet: exp(-inf - 0) = 0
        shares = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        weight = weight * fade + tl.sum(shares, 1)
        mixed = mixed * fade[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        top = new_top

    mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    out_at = out + (token.to(tl.int64) * H + head)[:, None] * E + e[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=live[:, None] & (e[None, :] < E))


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
) -> None:
    op = "paged_attention"
    check_shapes(
        op,
        q=(q_THD, "T H D"),
        k_cache=(k_cache, "N B G D"),
        v_cache=(v_cache, "N B G E"),
        block_tables=(block_tables_SM, "S M"),
        seq_lens=(seq_lens_S, "S"),
        query_start=(query_start, "Q"),
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
) -> Tensor:
    _check(q_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_start, scale, window, softcap)
    check_types("paged_attention", KERNEL_FLOATS, q=q_THD)
    check_dense_planes("paged_attention", k_cache=k_cache, v_cache=v_cache)
    num_tokens, heads, head_size = q_THD.shape
    _, block_tokens, kv_heads, v_size = v_cache.shape
    num_seqs, group = seq_lens_S.shape[0], heads // kv_heads
    out = q_THD.new_empty((num_tokens, heads, v_size))
    if out.numel() == 0:
        return out
    q, tables = with_dense_heads(q_THD), as_rows(block_tables_SM) if num_seqs else block_tables_SM
    block_d, block_e = (max(16, ceil_to_power_of_2(size)) for size in (head_size, v_size))
    block_m = max(_query_rows(num_tokens, num_seqs, max(block_d, block_e)), ceil_to_power_of_2(group))
    queries = block_m // group
    with on_device(q):
        _kernel[num_tokens // queries + num_seqs + 1, kv_heads](
            q,
            k_cache,
            v_cache,
            tables,
            seq_lens_S.contiguous(),
            query_start.contiguous(),
            out,
            scale,
            softcap,
            num_tokens,
            num_seqs,
            tables.stride(0),
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            H=heads,
            GROUP=group,
            D=head_size,
            E=v_size,
            B=block_tokens,
            WINDOW=window,
            SOFTCAP=softcap > 0,
            QUERIES=queries,
            BLOCK_M=block_m,
            BLOCK_N=_keys_at_once(max(block_d, block_e) * q.element_size()),
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            # the interpreter's dot takes bf16 for integers
            FLOAT32_DOT=q.dtype == torch.float32 or not q.is_cuda,
            num_warps=4,
            num_stages=2,
        )
    return out


def _query_rows(num_tokens: int, num_seqs: int, head_block: int) -> int:
    """Rows of a query tile: the least that a tensor core takes for decode, more for longer queries."""
    if num_tokens <= num_seqs:
        return 16
    return 64 if head_block <= 128 else 32


def _keys_at_once(key_bytes: int) -> int:
    """Two stages of K and V take 64 KiB of shared memory (128 KiB for float32 heads of 512)."""
    return min(max(16384 // key_bytes, 16), 64)


torch.library.define(
    "ostinato::paged_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, Tensor query_start, "
    "float scale, int window, float softcap) -> Tensor",
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
) -> Tensor:
    _check(q_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_start, scale, window, softcap)
    return q_THD.new_empty((q_THD.shape[0], q_THD.shape[1], v_cache.shape[3]))


OP = torch.ops.ostinato.paged_attention.default
