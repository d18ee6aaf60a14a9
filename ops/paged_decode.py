"""The decode kernel of paged_attention: one query token, its keys split over several programs.

A program takes the GROUP query heads of one KV head (rows of its products, padded to 16) and one run of keys.
Runs are cut on the device from the lengths, so the grid follows from shapes alone; a program without keys
ends at once.  Each program leaves its unnormalised output and softmax sums in a work space and counts itself;
the last to arrive adds all of them in order of the keys, so the result does not depend on who is last, and
sets the count back to 0 for the next launch or replay.
The counts are shared by all launches on a stream, one after another.
Programmatic dependent launch: lengths, tables and earlier keys are taken for written before the kernel ahead
began (true when at least one ordinary launch follows what writes them), so indices are read, and the first
keys and values asked into L2, before the wait.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.attention_scores import (
    capped,
    key_places,
    prefetch_rows,
    score_factor,
    score_scales,
    shares_and_fade,
)
from ostinato.ops.launch import as_rows, ceil_to_power_of_2, has_pdl, jit, on_device, tl, with_dense_heads
from ostinato.ops.rope_kv_write import turned, write_turned

__all__ = ["CANDIDATES", "DecodeConfig", "NewKeys", "decode"]


class DecodeConfig(NamedTuple):
    """How a launch splits its work."""

    keys: int  # keys of one step of a program's loop
    num_warps: int
    num_stages: int
    max_splits: int  # programs that share the keys of one query and KV head, at most
    min_steps: int  # steps of its loop that a program takes before another shares the keys


class NewKeys(NamedTuple):
    """What rope_kv_write takes besides q and planes: for a launch that does its work too."""

    k_TGD: Tensor
    v_TGE: Tensor
    cos_TR: Tensor
    sin_TR: Tensor
    slots_T: Tensor
    q_weight_D: Tensor | None
    k_weight_D: Tensor | None
    eps: float
    offset: float
    round_first: bool
    interleaved: bool


@jit
def _store_finished(  # type: ignore[no-untyped-def]  # Triton
    out, sinks, mixed, weight, top, token, first_head, r, e, H, GROUP, E: tl.constexpr, SINKS: tl.constexpr
):
    """Outputs of the heads `first_head + r` from their sums; a sink is one more score without a value."""
    head, live = first_head + r, r < GROUP
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        base = tl.maximum(top, sink)
        fade = tl.exp2(top - base)
        weight = weight * fade + tl.exp2(sink - base)
        mixed = mixed * fade[:, None]
    mixed = mixed / weight[:, None]
    out_at = out + (token.to(tl.int64) * H + head)[:, None] * E + e[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=live[:, None] & (e < E)[None, :])


@jit
def _add_runs(  # type: ignore[no-untyped-def]  # Triton
    sums, tops, weights, first_row, num_runs, r, e, GROUP, E, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The sums of all runs as one; those of run i and head r are in row first_row + i * GROUP + r."""
    # runs whose loads are under way together
    AT_ONCE: tl.constexpr = min(max(8192 // (BLOCK_H * BLOCK_E), 1), 8)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_E], tl.float32)
    for start in range(0, num_runs, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            row = first_row + (start + i) * GROUP + r
            live = r < tl.where(start + i < num_runs, GROUP, 0)
            run_top = tl.load(tops + row, mask=live, other=float("-inf"), cache_modifier=".cg")
            run_weight = tl.load(weights + row, mask=live, other=0.0, cache_modifier=".cg")
            at = sums + row[:, None] * E + e[None, :]
            run_mixed = tl.load(at, mask=live[:, None] & (e < E)[None, :], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, run_top)
            base = tl.where(r < GROUP, new_top, 0.0)
            share, fade = tl.exp2(run_top - base), tl.exp2(top - base)
            weight = weight * fade + share * run_weight
            mixed = mixed * fade[:, None] + share[:, None] * run_mixed
            top = new_top
    return mixed, tl.where(r < GROUP, weight, 1.0), top


@jit
def _sequence_of(token, query_start, num_seqs):  # type: ignore[no-untyped-def]  # Triton
    """The sequence of a token: as many as end at it or before."""
    ended = tl.zeros([256], tl.int32)
    for start in range(0, num_seqs, 256):
        each = start + tl.arange(0, 256)
        stop = tl.load(query_start + 1 + each, mask=each < num_seqs, other=0).to(tl.int32)
        ended += ((each < num_seqs) & (stop <= token)).to(tl.int32)
    return tl.sum(ended, 0)


@jit(do_not_specialize=["num_seqs", "table_stride", "window", "min_steps", "singles_only"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    query_start,
    sinks,
    out,
    sums,
    arrivals,
    k_new,
    v_new,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    eps,
    offset,
    scale,
    softcap,
    window,
    num_seqs,
    table_stride,
    min_steps,
    singles_only,
    q_stride_t,
    q_stride_h,
    k_stride_n,
    k_stride_b,
    k_stride_g,
    v_stride_n,
    v_stride_b,
    v_stride_g,
    k_new_stride_t,
    k_new_stride_g,
    v_new_stride_t,
    v_new_stride_g,
    cos_stride,
    sin_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
    IS_GPU: tl.constexpr,
    PDL: tl.constexpr,
    ROPE: tl.constexpr,
    R: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """One run of the keys of one token and KV head.

    Row r of the grid is token r of any sequence; with `singles_only` it is sequence r, which is left alone
    unless it has exactly one token.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, grid_row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq = grid_row
    first = tl.load(query_start + grid_row).to(tl.int32)
    stop = tl.load(query_start + grid_row + 1).to(tl.int32)
    token = tl.where(singles_only != 0, first, grid_row)
    is_left = (singles_only != 0) & (stop - first != 1)
    if (singles_only == 0) & ((first != grid_row) | (stop != grid_row + 1)):  # not one token of each sequence
        seq = _sequence_of(grid_row, query_start, num_seqs)
        first = tl.load(query_start + seq).to(tl.int32)
        stop = tl.load(query_start + seq + 1, mask=seq < num_seqs, other=0).to(tl.int32)
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    visible = tl.where(is_left | (seq >= num_seqs), 0, length - stop + token + 1)
    oldest = 0
    if WINDOW:  # blocks before it may have been freed
        oldest = tl.maximum(visible - window, 0)
    base = oldest // B * B
    steps = tl.maximum((visible - base + BLOCK_N - 1) // BLOCK_N, 0)
    num_runs = tl.maximum(
        tl.minimum(steps // min_steps, num_splits), 1
    )  # alike: no short one behind the rest
    run = (steps + num_runs - 1) // num_runs
    key_first = base + split * run * BLOCK_N
    key_stop = tl.minimum(key_first + run * BLOCK_N, visible)

    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    head = kv_head * GROUP + m
    live = (m < GROUP)[:, None] & (e < E)[None, :]
    table = block_tables + seq.to(tl.int64) * table_stride
    k_plane = k_cache + kv_head.to(tl.int64) * k_stride_g
    v_plane = v_cache + kv_head.to(tl.int64) * v_stride_g
    if key_first >= key_stop:
        if PDL:  # also here: a kernel that ended before the one ahead would let the next one begin
            tl.extra.cuda.gdc_wait()
        if (split == 0) & (visible <= 0) & ~is_left:
            out_at = out + (token.to(tl.int64) * H + head)[:, None] * E + e[None, :]
            tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_E], out.dtype.element_ty), mask=live)
        return
    if PDL:
        block, place = key_places(table, key_first, key_stop - 1, B, BLOCK_N, IS_GPU)
        prefetch_rows(k_plane + block * k_stride_n + place * k_stride_b, D, BLOCK_D)
        prefetch_rows(v_plane + block * v_stride_n + place * v_stride_b, E, BLOCK_E)
        tl.extra.cuda.gdc_wait()

    q_rows = q + token.to(tl.int64) * q_stride_t + head * q_stride_h
    if ROPE:
        # every program writes the new keys of its run, to read them then; if several do, the same bytes
        held = visible - 1 - token  # position of a token less its number
        one, pair_at = tl.arange(0, 1).to(tl.int64), tl.arange(0, HALF)
        for new in range(tl.maximum(first, key_first - held), tl.minimum(token + 1, key_stop - held)):
            row = one + new
            slot = tl.load(slots + row).to(tl.int64)
            taken = slot >= 0
            turns = taken[:, None] & (pair_at < R // 2)[None, :]
            cos_at = cos + row[:, None] * cos_stride + pair_at[None, :]
            sin_at = sin + row[:, None] * sin_stride + pair_at[None, :]
            c = tl.load(cos_at, mask=turns, other=0.0).to(tl.float32)
            s = tl.load(sin_at, mask=turns, other=0.0).to(tl.float32)
            write_turned(
                k_new + row * k_new_stride_t + kv_head * k_new_stride_g,
                k_plane + slot // B * k_stride_n + slot % B * k_stride_b,
                taken,
                k_weight,
                c,
                s,
                eps,
                offset,
                D,
                R,
                NORM_K,
                ROUND_FIRST,
                INTERLEAVED,
                HALF,
                REST,
            )
            v_from = v_new + row * v_new_stride_t + kv_head * v_new_stride_g
            v_to = v_plane + slot // B * v_stride_n + slot % B * v_stride_b
            copied = taken[:, None] & (e < E)[None, :]
            new_value = tl.load(v_from[:, None] + e[None, :], mask=copied)
            tl.store(v_to[:, None] + e[None, :], new_value, mask=copied)
        tl.debug_barrier()  # the new keys are read by other threads than those that wrote them
        queries = turned(
            q_rows,
            m < GROUP,
            q_weight,
            cos + token.to(tl.int64) * cos_stride,
            sin + token.to(tl.int64) * sin_stride,
            eps,
            offset,
            D,
            R,
            NORM_Q,
            ROUND_FIRST,
            INTERLEAVED,
            BLOCK_D,
        )
        queries = queries.to(q.dtype.element_ty)
    else:
        q_live = (m < GROUP)[:, None] & (d < D)[None, :]
        queries = tl.load(q_rows[:, None] + d[None, :], mask=q_live, other=0.0)
    if FLOAT32_DOT:
        queries = queries.to(tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up at the end: a sum is a barrier of warps
    mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    factor = score_factor(scale, softcap, SOFTCAP)
    for start in range(key_first, key_stop, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < key_stop
        if WINDOW:
            there &= n >= oldest
        block, place = key_places(table, start, key_stop - 1, B, BLOCK_N, IS_GPU)
        k_at = k_plane + (block * k_stride_n + place * k_stride_b)[:, None] + d[None, :]
        v_at = v_plane + (block * v_stride_n + place * v_stride_b)[:, None] + e[None, :]
        keys = tl.load(k_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
        values = tl.load(v_at, mask=there[:, None] & (e < E)[None, :], other=0.0)
        if FLOAT32_DOT:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        dots = tl.dot(queries, keys.T, input_precision="ieee")
        scores = capped(dots, scale, SOFTCAP, FLOAT32_DOT)
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shares, fade = shares_and_fade(scores, top, new_top, factor, FLOAT32_DOT)
        weights = weights * fade[:, None] + shares
        mixed = mixed * fade[:, None]
        mixed = tl.dot(shares.to(values.dtype), values, mixed, input_precision="ieee")
        top = new_top

    top *= factor
    weight = tl.sum(weights, 1)
    first_head = kv_head * GROUP
    num_runs = (steps + run - 1) // run
    if num_runs > 1:
        # [pairs, splits, GROUP] rows of E sums, then as many tops, then as many weights
        pair, num_pairs = grid_row * tl.num_programs(0) + kv_head, tl.num_programs(0) * tl.num_programs(1)
        first_row = pair.to(tl.int64) * num_splits * GROUP
        num_rows = num_pairs.to(tl.int64) * num_splits * GROUP
        tops, total_weights = sums + num_rows * E, sums + num_rows * (E + 1)
        at = first_row + split * GROUP + m
        tl.store(sums + at[:, None] * E + e[None, :], mixed, mask=live)
        tl.store(tops + at, top, mask=m < GROUP)
        tl.store(total_weights + at, weight, mask=m < GROUP)
        tl.debug_barrier()  # all threads have stored before the program is counted
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == num_runs - 1:
            tl.store(arrivals + pair, 0)
            h = tl.arange(0, BLOCK_H)
            all_mixed, all_weight, all_top = _add_runs(
                sums, tops, total_weights, first_row, num_runs, h, e, GROUP, E, BLOCK_H, BLOCK_E
            )
            _store_finished(
                out, sinks, all_mixed, all_weight, all_top, token, first_head, h, e, H, GROUP, E, SINKS
            )
    else:
        _store_finished(out, sinks, mixed, weight, top, token, first_head, m, e, H, GROUP, E, SINKS)


def decode(
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
    singles_only: bool,
    config: DecodeConfig | None = None,
    new_keys: NewKeys | None = None,
) -> None:
    """Fill `out` for every token (T <= S), or with `singles_only` for the sequences of one token.

    With `new_keys`, q and the keys of the step are first rotated, and the keys and values written.
    """
    num_tokens, heads, head_size = q_THD.shape
    _, block_tokens, kv_heads, v_size = v_cache.shape
    num_seqs, group = seq_lens_S.shape[0], heads // kv_heads
    num_rows = num_seqs if singles_only else num_tokens
    block_d, block_e = (max(16, ceil_to_power_of_2(size)) for size in (head_size, v_size))
    block_m = max(16, ceil_to_power_of_2(group))
    config = config or _config(max(block_d, block_e) * q_THD.element_size())
    q, tables = with_dense_heads(q_THD), as_rows(block_tables_SM).int()
    pairs = num_rows * kv_heads
    splits, min_steps = _splits(pairs, tables.shape[1] * block_tokens, config)
    num_sums = pairs * splits * group * (v_size + 2) if splits > 1 else 1
    sums = out_THE.new_empty(num_sums, dtype=torch.float32)
    pdl, has_rope = has_pdl(q), new_keys is not None
    # any tensors stand for what is missing: they are not touched
    new = new_keys or NewKeys(q, q, q, q, seq_lens_S, None, None, 0.0, 0.0, False, False)
    k_new, v_new = with_dense_heads(new.k_TGD), with_dense_heads(new.v_TGE)
    cos, sin = (as_rows(new.cos_TR), as_rows(new.sin_TR)) if has_rope else (q, q)
    num_rotated = cos.shape[1] if has_rope else 0
    first_scale, second_scale = score_scales(scale, softcap)
    with on_device(q):
        _kernel[kv_heads, num_rows, splits](
            q,
            k_cache,
            v_cache,
            tables,
            seq_lens_S.contiguous(),
            query_start.contiguous(),
            q if sinks_H is None else sinks_H.contiguous(),
            out_THE,
            sums,
            _arrivals(out_THE.device),
            k_new,
            v_new,
            cos,
            sin,
            new.slots_T.contiguous(),
            q if new.q_weight_D is None else new.q_weight_D.contiguous(),
            q if new.k_weight_D is None else new.k_weight_D.contiguous(),
            new.eps,
            new.offset,
            first_scale,
            second_scale,
            window,
            num_seqs,
            tables.stride(0),
            min_steps,
            int(singles_only),
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *k_new.stride()[:2],
            *v_new.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            H=heads,
            GROUP=group,
            D=head_size,
            E=v_size,
            B=block_tokens,
            WINDOW=window > 0,
            SOFTCAP=softcap > 0,
            SINKS=sinks_H is not None,
            BLOCK_M=block_m,
            BLOCK_N=config.keys,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            BLOCK_H=ceil_to_power_of_2(group),
            # the interpreter's dot takes bf16 for integers
            FLOAT32_DOT=q.dtype == torch.float32 or not q.is_cuda,
            IS_GPU=q.is_cuda,
            PDL=pdl,
            ROPE=has_rope,
            R=num_rotated,
            NORM_Q=new.q_weight_D is not None,
            NORM_K=new.k_weight_D is not None,
            ROUND_FIRST=new.round_first,
            INTERLEAVED=new.interleaved,
            HALF=ceil_to_power_of_2(num_rotated // 2),
            REST=ceil_to_power_of_2(head_size - num_rotated),
            num_warps=max(config.num_warps, block_m // 16),
            num_stages=config.num_stages,
            launch_pdl=pdl,
        )


# By the bytes of a head (a power of two, the larger of K's and V's). The first is taken; the benchmark times
# all. A step of K and V is 32 KiB: at 4 TB/s over 132 multiprocessors with 1 us of latency, 32 KiB per
# multiprocessor must be under way.
CANDIDATES: dict[int, tuple[DecodeConfig, ...]] = {
    128: (DecodeConfig(64, 4, 3, 16, 8), DecodeConfig(128, 4, 3, 16, 4), DecodeConfig(32, 2, 4, 16, 16)),
    256: (
        DecodeConfig(64, 4, 3, 16, 8),
        DecodeConfig(32, 4, 4, 16, 16),
        DecodeConfig(32, 2, 4, 16, 16),
        DecodeConfig(128, 8, 3, 16, 4),
    ),
    512: (DecodeConfig(32, 4, 3, 16, 16), DecodeConfig(64, 8, 3, 16, 8)),
    1024: (DecodeConfig(16, 4, 3, 16, 32), DecodeConfig(32, 8, 3, 16, 16)),
}
_PROGRAMS = 264  # two per multiprocessor of an H200: the grid that a batch should fill
_SPLIT_PAIRS = 4096  # pairs of token and KV head, at most, whose keys are split


def _config(head_bytes: int) -> DecodeConfig:
    return CANDIDATES[min(max(head_bytes, 128), 1024)][0]


def _splits(pairs: int, most_keys: int, config: DecodeConfig) -> tuple[int, int]:
    """Programs per pair, and the least steps of one of them; from shapes alone.

    Enough to fill the GPU when all sequences are alike; in a larger batch more, for sequences that are much
    longer than `min_steps` steps, while the others leave theirs without keys. Those take time, too, so there
    are no more of them than a few for each place on the GPU.
    """
    if pairs > _SPLIT_PAIRS:
        return 1, 1
    to_fill = max(_PROGRAMS // pairs, 1)
    for_long = min(-(-most_keys // (4 * config.min_steps * config.keys)), 16 * _PROGRAMS // pairs)
    splits = min(max(to_fill, for_long), config.max_splits, max(-(-most_keys // config.keys), 1))
    return splits, max(config.min_steps // to_fill, 1)


_ARRIVALS: dict[tuple[torch.device, int], Tensor] = {}


def _arrivals(device: torch.device) -> Tensor:
    """Zeros between launches, of the current stream: steps of two engines on one GPU run at the same time."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    found = _ARRIVALS.get((device, stream))
    if found is None:
        found = torch.zeros(_SPLIT_PAIRS, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found  # of the graph's own memory, and zeroed by every replay: right, but slower
        _ARRIVALS[device, stream] = found
    return found
