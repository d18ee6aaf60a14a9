"""The prefill kernel of paged_attention: tiles of the query tokens of one sequence over all of their keys.

A tile is QUERIES tokens with the GROUP query heads of one KV head, BLOCK_M rows: the heads share each key
that is loaded, and few keys of a tile's last steps are past a row's own.  Masks are applied in those steps
only.
A program finds its tile on the device from query_start: real tiles come first, the last tokens of a sequence
(those with the most keys) before the first ones, and where the grid, which follows from shapes alone, has
fewer programs than there are tiles, a program takes several.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.attention_scores import (
    capped,
    key_places,
    score_factor,
    score_scales,
    shares_and_fade,
)
from ostinato.ops.launch import as_rows, ceil_to_power_of_2, jit, on_device, tl, with_dense_heads

__all__ = ["CANDIDATES", "PrefillConfig", "prefill"]


class PrefillConfig(NamedTuple):
    """How a launch splits its work."""

    rows: int  # query rows of a tile, if GROUP heads fit
    keys: int  # of one step of its loop
    num_warps: int
    num_stages: int


@jit
def _find_tile(  # type: ignore[no-untyped-def]  # Triton
    tile, query_start, seq_lens, num_tokens, num_seqs, min_new, QUERIES: tl.constexpr, SEQS: tl.constexpr
):
    """(sequence, the token past its last, its length, the first token of the tile, number of tiles).

    Sequences of fewer than `min_new` tokens have no tiles.  The rows past the last sequence are handled as
    one more sequence, of length 0.  When there are fewer tiles, the sequence is one of no tokens.
    """
    seq, first, stop, length, behind, num_before = 0, 0, 0, 0, 0, 0
    for start in range(0, num_seqs + 1, SEQS):
        each = start + tl.arange(0, SEQS)
        begin = tl.load(query_start + each, mask=each <= num_seqs, other=num_tokens).to(tl.int32)
        end = tl.load(query_start + each + 1, mask=each < num_seqs, other=num_tokens).to(tl.int32)
        cached = tl.load(seq_lens + each, mask=each < num_seqs, other=0).to(tl.int32)
        tiles = (end - begin + QUERIES - 1) // QUERIES
        tiles = tl.where((end - begin < min_new) & (each < num_seqs), 0, tiles)
        past = num_before + tl.cumsum(tiles, 0)
        num_before += tl.sum(tiles, 0)
        mine = (tile < past) & (tile >= past - tiles)  # of one sequence at most
        seq += tl.sum(tl.where(mine, each, 0), 0)
        first += tl.sum(tl.where(mine, begin, 0), 0)
        stop += tl.sum(tl.where(mine, end, 0), 0)
        length += tl.sum(tl.where(mine, cached, 0), 0)
        behind += tl.sum(tl.where(mine, past - 1 - tile, 0), 0)
    return seq, stop, length, first + behind * QUERIES, num_before


@jit(do_not_specialize=["num_tokens", "num_seqs", "table_stride", "window", "min_new"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    query_start,
    sinks,
    out,
    scale,
    softcap,
    window,
    num_tokens,
    num_seqs,
    table_stride,
    min_new,
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
    SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SEQS: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
    IS_GPU: tl.constexpr,
):
    kv_head = tl.program_id(0)
    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    head = kv_head * GROUP + m % GROUP
    k_plane = k_cache + kv_head.to(tl.int64) * k_stride_g
    v_plane = v_cache + kv_head.to(tl.int64) * v_stride_g
    factor = score_factor(scale, softcap, SOFTCAP)
    tile = tl.program_id(1)
    num_tiles = tile + 1
    while tile < num_tiles:
        seq, seq_stop, length, tile_first, num_tiles = _find_tile(
            tile, query_start, seq_lens, num_tokens, num_seqs, min_new, QUERIES, SEQS
        )
        token = tile_first + m // GROUP
        position = length - seq_stop + token
        live = (m // GROUP < QUERIES) & (token < seq_stop)
        q_at = q + token.to(tl.int64)[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
        queries = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        if FLOAT32_DOT:
            queries = queries.to(tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

        first_position = length - seq_stop + tile_first
        key_stop = length - seq_stop + tl.minimum(tile_first + QUERIES, seq_stop)
        key_first, clear_first = 0, 0  # steps between clear_first and clear_stop need no mask
        if WINDOW:  # blocks before it may have been freed
            key_first = tl.maximum(first_position - window + 1, 0) // B * B
            clear_first = key_stop - window
        clear_stop = first_position + 1
        # the pipeline reads an entry ahead of the first step, also where there is no step
        table = block_tables + tl.minimum(seq, num_seqs - 1).to(tl.int64) * table_stride
        last = tl.maximum(key_stop - 1, 0)
        for start in range(key_first, key_stop, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            there = n < key_stop
            if WINDOW:
                there &= n > first_position - window
            block, place = key_places(table, start, last, B, BLOCK_N, IS_GPU)
            k_at = k_plane + (block * k_stride_n + place * k_stride_b)[:, None] + d[None, :]
            v_at = v_plane + (block * v_stride_n + place * v_stride_b)[:, None] + e[None, :]
            keys = tl.load(k_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
            values = tl.load(v_at, mask=there[:, None] & (e < E)[None, :], other=0.0)
            if FLOAT32_DOT:
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            dots = tl.dot(queries, keys.T, input_precision="ieee")
            scores = capped(dots, scale, SOFTCAP, FLOAT32_DOT)
            if (start + BLOCK_N > clear_stop) | (start < clear_first):
                visible = there[None, :] & (n[None, :] <= position[:, None])
                if WINDOW:
                    visible &= n[None, :] > position[:, None] - window
                scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shares, fade = shares_and_fade(scores, top, new_top, factor, FLOAT32_DOT)
            weight = weight * fade + tl.sum(shares, 1)
            mixed = mixed * fade[:, None]
            mixed = tl.dot(shares.to(values.dtype), values, mixed, input_precision="ieee")
            top = new_top

        if SINKS:  # one more score without a value; a row without keys stays zero
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            top *= factor
            base = tl.maximum(top, sink)
            fade = tl.exp2(top - base)
            weight = weight * fade + tl.exp2(sink - base)
            mixed = mixed * fade[:, None]
        mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
        out_at = out + (token.to(tl.int64) * H + head)[:, None] * E + e[None, :]
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=live[:, None] & (e < E)[None, :])
        tile += tl.num_programs(1)


def prefill(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    sinks_H: Tensor | None,
    out_THE: Tensor,
    scale: float,
    window: int,
    softcap: float,
    *,
    min_new: int,
    config: PrefillConfig | None = None,
) -> None:
    """Fill `out` for the sequences of at least `min_new` tokens, and the rows past the last sequence."""
    num_tokens, heads, head_size = q_THD.shape
    _, block_tokens, kv_heads, v_size = v_cache.shape
    num_seqs, group = seq_lens_S.shape[0], heads // kv_heads
    block_d, block_e = (max(16, ceil_to_power_of_2(size)) for size in (head_size, v_size))
    config = config or _config(max(block_d, block_e), num_tokens * group, q_THD)
    block_m = max(config.rows, ceil_to_power_of_2(group))
    queries = block_m // group
    q, tables = with_dense_heads(q_THD), as_rows(block_tables_SM).int()
    first_scale, second_scale = score_scales(scale, softcap)
    num_programs = num_tokens // queries + min(num_seqs, _SPARE_TILES) + 1
    with on_device(q):
        _kernel[kv_heads, num_programs](
            q,
            k_cache,
            v_cache,
            tables,
            seq_lens_S.contiguous(),
            query_start.contiguous(),
            q if sinks_H is None else sinks_H.contiguous(),
            out_THE,
            first_scale,
            second_scale,
            window,
            num_tokens,
            num_seqs,
            tables.stride(0),
            min_new,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            H=heads,
            GROUP=group,
            D=head_size,
            E=v_size,
            B=block_tokens,
            WINDOW=window > 0,
            SOFTCAP=softcap > 0,
            SINKS=sinks_H is not None,
            QUERIES=queries,
            BLOCK_M=block_m,
            BLOCK_N=config.keys,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            SEQS=32 * config.num_warps,
            # the interpreter's dot takes bf16 for integers
            FLOAT32_DOT=q.dtype == torch.float32 or not q.is_cuda,
            IS_GPU=q.is_cuda,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


# By the larger of the powers of two that hold a K and a V head, for 16-bit types.  The first is taken; the
# benchmark times all.  A step's K and V are twice in shared memory (3 stages: table, loads, products).
CANDIDATES: dict[int, tuple[PrefillConfig, ...]] = {
    64: (PrefillConfig(128, 128, 8, 3), PrefillConfig(128, 64, 4, 3), PrefillConfig(64, 128, 4, 3)),
    128: (
        PrefillConfig(128, 128, 8, 3),
        PrefillConfig(128, 64, 8, 3),
        PrefillConfig(128, 64, 8, 4),
        PrefillConfig(64, 64, 4, 3),
    ),
    256: (PrefillConfig(128, 64, 8, 2), PrefillConfig(64, 64, 4, 2)),
    512: (PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 16, 8, 2)),
}
_SPARE_TILES = 32  # programs beyond those of full tiles; more sequences share them


def _config(head_block: int, num_rows: int, q: Tensor) -> PrefillConfig:
    if q.dtype == torch.float32:  # no tensor cores: every product is an instruction of its own
        return PrefillConfig(32 if head_block <= 128 else 16, 32 if head_block <= 128 else 16, 4, 2)
    return CANDIDATES[min(max(head_block, 64), 512)][0]
