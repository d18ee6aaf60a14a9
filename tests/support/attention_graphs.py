"""The part of an attention layer between projections and attention, in the spellings that models use.

T tokens, H query heads, G KV heads, D head size, E value size, R rotated values of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.ops import kv_write, paged_attention

H, G, D, E, BLOCK = 4, 2, 16, 12, 4
Rope = Callable[[Tensor, Tensor, Tensor], Tensor]

# Where the token count stands in the arguments of `attention`.
TOKENS = {0: 1, 1: 1, 2: 1, 3: 1, 6: 0}


def halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def llama_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + halves(x) * sin


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * cos + halves(turned) * sin, rest), dim=-1)


def glm_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * cos + neighbours(turned) * sin, rest), dim=-1)


def olmo_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos + halves(x) * sin).to(x.dtype)


def cohere_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    return (wide * cos + neighbours(wide) * sin).to(x.dtype)


def ernie_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos + neighbours(x).float() * sin).to(x.dtype)


def attention(
    rope: Rope,
    *,
    table: str = "halves",
    repeats: bool = False,
    heads_dim: int = 1,
    own_tables: bool = False,
    table_type: torch.dtype | None = None,
) -> Callable[..., Any]:
    """A function of (q, k, v, angles, k_cache, v_cache, slots, tables, lengths, starts) -> attention.

    q, k, v are [1, T, heads, size]; angles [1, T, R / 2].
    """

    def make_table(angles: Tensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        if table == "halves":
            angles = torch.cat((angles, angles), dim=-1)
        elif table == "neighbours":
            angles = angles.repeat_interleave(2, dim=-1)
        return (function(angles) * 1.1).to(dtype)

    def spread(tables: Sequence[Tensor]) -> list[Tensor]:
        wide = [t.unsqueeze(heads_dim) for t in tables]
        if repeats:
            wide = [t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in wide]
        return wide

    def heads(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if heads_dim == 1 else x

    def layer(
        q: Tensor, k: Tensor, v: Tensor, angles: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
        tables: Tensor, lengths: Tensor, starts: Tensor,
    ) -> Tensor:  # fmt: skip
        dtype = table_type or q.dtype
        cos_sin = [make_table(angles, torch.cos, dtype), make_table(angles, torch.sin, dtype)]
        for_q = spread(cos_sin)
        for_k = spread(cos_sin) if own_tables else for_q
        q, k = heads(rope(heads(q), *for_q)), heads(rope(heads(k), *for_k))
        kv_write.OP(k[0], v[0], k_cache, v_cache, slots)
        return paged_attention.OP(q[0], k_cache, v_cache, tables, lengths, starts, 0.25, 0, 0.0)

    return layer


def make_inputs(
    dtype: torch.dtype = torch.float32, *, rotated: int = D, table: str = "halves"
) -> Callable[[int], list[Tensor]]:
    """Fresh arguments of a layer for one sequence of `tokens` new tokens; caches are zeros."""
    columns = rotated if table == "given" else rotated // 2

    def make(tokens: int) -> list[Tensor]:
        blocks = 4
        return [
            torch.randn(1, tokens, H, D).to(dtype),
            torch.randn(1, tokens, G, D).to(dtype),
            torch.randn(1, tokens, G, E).to(dtype),
            torch.randn(1, tokens, columns),
            torch.zeros(blocks, BLOCK, G, D, dtype=dtype),
            torch.zeros(blocks, BLOCK, G, E, dtype=dtype),
            torch.arange(tokens),
            torch.arange(blocks, dtype=torch.int32)[None],
            torch.tensor([tokens], dtype=torch.int32),
            torch.tensor([0, tokens], dtype=torch.int32),
        ]

    return make
