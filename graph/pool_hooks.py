"""Hooks for models whose inputs are whole sequences: attention becomes `ostinato::varlen_attention`.

As in hooks.py nothing is guessed: whether a layer is causal and which window it has is what the mask says
that transformers itself asked for. Models with attention of their own code (MPNet) get a mask that is a
tensor, which keeps sequences apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ostinato.ops.mean_rows
import ostinato.ops.sequence_mask
import ostinato.ops.varlen_attention  # noqa: F401  # registers the ops
from ostinato.errors import ModelError
from ostinato.graph.facts import AttentionFact
from ostinato.graph.hooks import CaptureHooks, is_mask, unknown_arguments


class PoolMask(NamedTuple):
    """Stands in for a mask while tracing."""

    causal: bool
    window: int  # keys this far away or farther are not seen; 0: all are


class PoolHooks(CaptureHooks):
    """One tracing run of a model that embeds or scores."""

    def __init__(self) -> None:
        super().__init__()
        self.makes_masks = False  # tensors, for attention that does not go through transformers' interface
        self.masks = 0  # that were made
        self._query_start: Tensor | None = None
        self._token_ids: Tensor | None = None

    def begin_pooling(self, query_start: Tensor, token_ids: Tensor) -> None:
        """Set the inputs of the coming forward."""
        self.attention, self.masks = [], 0
        self._query_start, self._token_ids = query_start, token_ids

    def _mask(self, *args: Any, **kwargs: Any) -> PoolMask | Tensor:
        local = int(kwargs.get("local_size") or 0)
        candidates = [PoolMask(True, local), PoolMask(False, local)]
        if local:  # a bidirectional window may count the token itself (Gemma) or not (ModernBERT)
            candidates.append(PoolMask(False, local + 1))
        found = [mask for mask in candidates if is_mask(kwargs["mask_function"], **mask._asdict())]
        if not found:
            raise ModelError(
                f"attention mask of {type(kwargs.get('config')).__name__} is neither causal nor "
                f"bidirectional with a sliding window (window {local or 'none'}); it cannot be served"
            )
        if not self.makes_masks:
            return found[0]
        if found[0] != PoolMask(causal=False, window=0):
            raise ModelError(
                f"{type(kwargs.get('config')).__name__}: attention of its own code with a mask that is not "
                "plainly bidirectional cannot be served"
            )
        self.masks += 1
        mask: Tensor = torch.ops.ostinato.sequence_mask(self._token_ids, self._query_start, kwargs["dtype"])
        return mask[None, None]

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        softcap: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        name = type(module).__name__
        if unknown := unknown_arguments(kwargs, dropout):
            raise ModelError(f"{name}: attention with {unknown} cannot be carried into the graph")
        if not isinstance(attention_mask, PoolMask):
            raise ModelError(f"{name}: no mask reached its attention (got {type(attention_mask).__name__})")
        causal, window = attention_mask
        if sliding_window and sliding_window != window:
            raise ModelError(
                f"{name}: sliding_window={sliding_window} but its mask has window {window or 'none'}"
            )
        batch, heads, _, head_size = query.shape
        kv_heads = key.shape[1]
        if batch != 1 or heads % kv_heads:
            raise ModelError(f"{name}: {heads} query heads cannot share {kv_heads} KV heads")
        scale = head_size**-0.5 if scaling is None else float(scaling)
        layer = len(self.attention)
        self.attention.append(AttentionFact(
            layer=layer, kv_layer=layer, heads=heads, kv_heads=kv_heads, head_size=head_size, scale=scale,
            window=window, softcap=float(softcap or 0.0), causal=causal,
        ))  # fmt: skip
        assert self._query_start is not None
        out = torch.ops.ostinato.varlen_attention(
            query.transpose(1, 2)[0], key.transpose(1, 2)[0], value.transpose(1, 2)[0], self._query_start,
            scale, causal, window, float(softcap or 0.0),
        )  # fmt: skip
        return out[None], None
