"""RMSNorm of each head of q and k in front of rope_kv_write  ->  inside it.

Numerics: close (one kernel, not three). A norm over all heads together (olmo2) stays an op of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ostinato.ops import rms_norm, rope_kv_write
from ostinato.passes.fuse_rope_kv_write import flat, proof_inputs
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Spelling, example
from ostinato.passes.trace import Example
from ostinato.passes.values import argument, tensor

aten = torch.ops.aten

EPS, OFFSET = 0.01234, 1.06789  # any numbers that stand in no other place of the patterns
NAMES = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "slots")


class FoldQKNorm(FusionPass):
    name = "fold_qk_norm"
    numerics = "close"
    needs = ("rms_norm", "rope_kv_write")
    anchors = (rope_kv_write.OP,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str | None:
        if argument(anchor, 8) is not None or argument(anchor, 9) is not None:
            return None
        q, k = (_norm_above(argument(anchor, place)) for place in (0, 1))
        if q is None or k is None:
            return None if q is k else "only one of q and k has a norm"
        head_size = tensor(argument(anchor, 0)).shape[-1]
        if any(tensor(norm).shape[-1] != head_size for norm in (q, k)):
            return "the norm spans all heads, not each one"
        if argument(q, 4) != argument(k, 4):
            return "the norms of q and k round in different places"
        return [_spelling(anchor, q, k)]


def _spelling(anchor: fx.Node, q: fx.Node, k: fx.Node) -> Spelling:
    examples: dict[str, Example] = {
        name: example(argument(anchor, place)) for place, name in enumerate(NAMES)
    }
    examples |= {"q": example(argument(q, 0)), "q_weight": example(argument(q, 1))}
    examples |= {
        "k": example(argument(k, 0)),
        "k_weight": example(argument(k, 1)),
        "eps": EPS,
        "offset": OFFSET,
    }
    flattened = argument(argument(anchor, 0), 0)
    heads_dim = 1 if flattened.target == aten.transpose.int else 2
    pattern, replacement = functions(heads_dim, argument(q, 4), argument(anchor, 13))
    return Spelling(pattern, replacement, examples, proof_inputs=proof_inputs("halves"))


def _norm_above(node: fx.Node) -> fx.Node | None:
    """The RMSNorm whose result, seen in another shape, is `node`."""
    views = {aten.select.int, aten.transpose.int, aten.view.default, aten.reshape.default}
    while node.target in views:
        node = argument(node, 0)
    return node if node.target == rms_norm.OP else None


@functools.cache
def functions(
    heads_dim: int, round_first: bool, interleaved: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement; the same objects each time, so that they are traced once."""

    def pattern(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
        slots: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float,
    ) -> Tensor:  # fmt: skip
        q = flat(rms_norm.OP(q, q_weight, eps, offset, round_first), heads_dim)
        k = flat(rms_norm.OP(k, k_weight, eps, offset, round_first), heads_dim)
        return rope_kv_write.OP(
            q, k, v, cos, sin, k_cache, v_cache, slots, None, None, 0.0, 0.0, False, interleaved
        )

    def replacement(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
        slots: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float,
    ) -> Tensor:  # fmt: skip
        return rope_kv_write.OP(
            flat(q, heads_dim), flat(k, heads_dim), v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight,
            eps, offset, round_first, interleaved,
        )  # fmt: skip

    return pattern, replacement
