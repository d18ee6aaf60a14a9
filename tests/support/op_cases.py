"""Inputs of the attention ops, shared by tests and benchmarks; every unused place holds a trap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FREED = 10**6  # a block number that no plane has: reading through it raises on CPU


class Heads(NamedTuple):
    """Query heads, KV heads, and the sizes of a K and a V head."""

    q: int
    kv: int
    k_size: int
    v_size: int


class PagedCase(NamedTuple):
    """One step in the arguments' order of `paged_attention`, and the same keys and values dense."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    k_dense: list[Tensor]  # per sequence [length, G, D]
    v_dense: list[Tensor]

    def args(
        self, *, scale: float = 0.3, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> list[Any]:
        return [*self[:6], scale, window, softcap, *([] if sinks is None else [sinks])]


def paged_case(
    lengths: Sequence[int],
    num_new: Sequence[int],
    heads: Heads,
    *,
    block_tokens: int = 4,
    window: int = 0,
    num_padding: int = 0,
    spare_columns: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedCase:
    """Sequences of `lengths` tokens, the last `num_new` of which are queries; then `num_padding` rows of q.

    Blocks are shuffled; what no query may read is NaN (cache) or FREED (table).
    """
    draw = torch.Generator().manual_seed(seed)
    per_seq = [-(-length // block_tokens) for length in lengths]
    num_blocks = sum(per_seq) + 3
    shuffled = torch.randperm(num_blocks, generator=draw).int()
    tables = torch.full((len(lengths), max(per_seq, default=0) + spare_columns), FREED, dtype=torch.int32)
    k_cache = torch.full((num_blocks, block_tokens, heads.kv, heads.k_size), float("nan"), dtype=dtype)
    v_cache = torch.full((num_blocks, block_tokens, heads.kv, heads.v_size), float("nan"), dtype=dtype)
    k_dense, v_dense, taken = [], [], 0
    for row, (length, new, blocks) in enumerate(zip(lengths, num_new, per_seq, strict=True)):
        k = torch.randn(length, heads.kv, heads.k_size, generator=draw).to(dtype)
        v = torch.randn(length, heads.kv, heads.v_size, generator=draw).to(dtype)
        k_dense.append(k)
        v_dense.append(v)
        oldest = max(0, length - new - window + 1) if window else 0
        position = torch.arange(oldest, length)
        used = shuffled[taken : taken + blocks]
        taken += blocks
        tables[row, :blocks] = used
        tables[row, : oldest // block_tokens] = FREED
        at = used.long()[position // block_tokens], position % block_tokens
        k_cache[at], v_cache[at] = k[oldest:], v[oldest:]
    starts = torch.tensor([0, *num_new]).cumsum(0).int()
    q = torch.randn(int(starts[-1]) + num_padding, heads.q, heads.k_size, generator=draw).to(dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return PagedCase(q, k_cache, v_cache, tables, seq_lens, starts, k_dense, v_dense)


def dense_attention(
    case: PagedCase,
    *,
    scale: float = 0.3,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The truth in float64 by the definition: a mask over all pairs, no blocks, no library attention."""
    out = torch.zeros(*case.q.shape[:2], case.v_cache.shape[3], dtype=torch.float64)
    starts = case.query_start.tolist()
    for k, v, first, stop in zip(case.k_dense, case.v_dense, starts[:-1], starts[1:], strict=True):
        out[first:stop] = masked_attention(case.q[first:stop], k, v, scale, window, softcap, sinks)
    return out


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Float64 attention of q [n, H, D], the last n of the L tokens of k [L, G, D] and v [L, G, E]."""
    group = q.shape[1] // k.shape[1]
    k, v = (kv.double().repeat_interleave(group, 1) for kv in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at_key = torch.arange(len(k))
    at_query = at_key[len(k) - len(q) :, None]
    visible = at_key <= at_query
    if window:
        visible &= at_key > at_query - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hnl,lhe->nhe", scores.softmax(-1)[..., : len(k)], v)


def rope_case(
    num_tokens: int,
    heads: Heads,
    *,
    num_rotated: int | None = None,
    block_tokens: int = 4,
    norm: bool = False,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Any]:
    """Arguments of `rope_kv_write`; q, k and v are slices of one merged tensor and every third slot is -1."""
    draw = torch.Generator().manual_seed(seed)
    q_width, k_width, v_width = heads.q * heads.k_size, heads.kv * heads.k_size, heads.kv * heads.v_size
    merged = torch.randn(num_tokens, q_width + k_width + v_width, generator=draw).to(dtype)
    q, k, v = merged.split([q_width, k_width, v_width], dim=1)
    half = (num_rotated or heads.k_size) // 2
    angle = torch.rand(num_tokens, half, generator=draw) * 100
    cos, sin = (torch.cat([table, table], 1).to(dtype) for table in (angle.cos(), angle.sin()))
    num_blocks = -(-num_tokens // block_tokens) + 2
    k_cache = torch.zeros(num_blocks, block_tokens, heads.kv, heads.k_size, dtype=dtype)
    v_cache = torch.zeros(num_blocks, block_tokens, heads.kv, heads.v_size, dtype=dtype)
    slots = torch.randperm(num_blocks * block_tokens, generator=draw)[:num_tokens]
    slots[::3] = -1
    weights = [torch.rand(heads.k_size, generator=draw).to(dtype) + 0.5 if norm else None for _ in range(2)]
    return [
        q.unflatten(1, (heads.q, heads.k_size)),
        k.unflatten(1, (heads.kv, heads.k_size)),
        v.unflatten(1, (heads.kv, heads.v_size)),
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        *weights,
        1e-6,
        0.0,
        True,
        interleaved,
    ]
