"""Hooks into transformers' interfaces: attention, masks and experts become ostinato ops while traced.

Nothing is guessed. The window of a layer comes from the mask that transformers itself asked for (its mask
function is probed and must equal a causal window); scale and softcap come with the attention call; a layer
whose keys are another layer's keys shares that layer's KV planes. What cannot be carried is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import ostinato.ops.kv_write
import ostinato.ops.moe_experts
import ostinato.ops.paged_attention  # noqa: F401  # registers the ops
from ostinato.errors import ModelError
from ostinato.graph.facts import AttentionFact, KVLayer

IMPLEMENTATION = "ostinato"

# Keyword arguments that reach attention functions and do not change its math in a single-row, no-cache call.
_HARMLESS = {
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict",
    "is_causal", "cache_position", "position_embeddings", "num_items_in_batch", "logits_to_keep", "cache",
    "past_key_values",
}  # fmt: skip


def unknown_arguments(kwargs: dict[str, Any], dropout: float) -> str:
    """Arguments of an attention call that change its math and that no op of ours has, as words."""
    unknown = sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None and v is not False)
    return ", ".join(unknown) or (f"dropout={dropout}" if dropout else "")


def is_mask(function: Callable[..., Any], *, causal: bool, window: int) -> bool:
    """Whether a mask function of transformers shows a query these keys and no others.

    `causal`: none after it; `window`: none so far away or farther, 0: at any distance.
    """
    with _disable_current_modes(), torch.no_grad():
        span = torch.arange(2 * window + 3 if 0 < window <= 64 else 67)
        # The second probe pairs the first keys with the queries for which they leave the window.
        edge = torch.arange(max(0, window - 3), window + 4)
        zero = torch.zeros((), dtype=torch.int64)
        for index in (span, torch.cat([torch.arange(7), edge])):
            query, key = index[:, None], index[None, :]
            want = key <= query if causal else torch.ones_like(key <= query)
            if window:
                want = want & ((query - key).abs() < window)
            if not torch.equal(torch.as_tensor(function(zero, zero, query, key)).expand_as(want), want):
                return False
    return True


class MaskFact(NamedTuple):
    """Stands in for a mask while tracing: only its window matters, the op does the rest."""

    window: int  # 0: plain causal


class CaptureHooks:
    """One tracing run: holds the step inputs that the ops need, and collects the facts it sees."""

    def __init__(self) -> None:
        self.attention: list[AttentionFact] = []
        self.kv_layers: list[KVLayer] = []
        self._keys: dict[int, tuple[Tensor, int]] = {}  # id of a key tensor -> (itself, KV layer)
        self._step: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._planes: list[Tensor] | None = None

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Make `attn_implementation="ostinato"` mean these hooks inside the block."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        registries = (
            (ALL_ATTENTION_FUNCTIONS, self._attention),
            (ALL_MASK_ATTENTION_FUNCTIONS, self._mask),
            (ALL_EXPERTS_FUNCTIONS, self._experts),
        )
        for registry, function in registries:
            registry._global_mapping[IMPLEMENTATION] = function
        try:
            yield
        finally:
            for registry, _ in registries:
                registry._global_mapping.pop(IMPLEMENTATION, None)

    def begin(
        self,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        planes: list[Tensor] | None,
    ) -> None:
        """Set the inputs of the coming forward. `planes=None` is a dry run that only collects facts."""
        self.attention, self.kv_layers, self._keys = [], [], {}
        self._step = (slot_mapping, block_tables, seq_lens, query_start)
        self._planes = planes

    def has_experts(self, model: nn.Module) -> bool:
        return any(hasattr(m, "has_gate") and hasattr(m, "is_transposed") for m in model.modules())

    def _mask(self, *args: Any, **kwargs: Any) -> Any:  # Any: what `_attention` then gets
        window = int(kwargs.get("local_size") or 0)
        if not is_mask(kwargs["mask_function"], causal=True, window=window):
            raise ModelError(
                f"attention mask of {type(kwargs.get('config')).__name__} is not causal with a sliding "
                f"window (window {window or 'none'}); chunked and bidirectional masks cannot be served"
            )
        return MaskFact(window)

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        softcap: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        name = type(module).__name__
        if unknown := unknown_arguments(kwargs, dropout):
            raise ModelError(f"{name}: attention with {unknown} cannot be carried into the graph")
        if not isinstance(attention_mask, MaskFact):
            raise ModelError(
                f"{name}: no causal mask reached its attention (got {type(attention_mask).__name__})"
            )
        if kwargs.get("is_causal") is False:
            raise ModelError(f"{name}: attention is not causal")
        window = attention_mask.window
        if sliding_window and sliding_window != window:
            raise ModelError(
                f"{name}: sliding_window={sliding_window} but its mask has window {window or 'none'}"
            )
        layer = len(self.attention)
        batch, heads, _, head_size = query.shape
        kv_heads, v_size = key.shape[1], value.shape[3]
        if batch != 1 or heads % kv_heads:
            raise ModelError(f"{name}: {heads} query heads cannot share {kv_heads} KV heads")
        scale = head_size**-0.5 if scaling is None else float(scaling)
        shared = self._keys.get(id(key))
        kv_layer = len(self.kv_layers) if shared is None else shared[1]
        self.attention.append(AttentionFact(
            layer=layer, kv_layer=kv_layer, heads=heads, kv_heads=kv_heads, head_size=head_size, scale=scale,
            window=window, softcap=float(softcap or 0.0),
        ))  # fmt: skip
        if shared is None:
            self._keys[id(key)] = (key, kv_layer)
            self.kv_layers.append(KVLayer(kv_heads=kv_heads, k_size=key.shape[3], v_size=v_size))
        if self._planes is None:
            return query.new_empty(1, query.shape[2], heads, v_size), None
        assert self._step is not None
        slot_mapping, block_tables, seq_lens, query_start = self._step
        k_cache, v_cache = self._planes[2 * kv_layer], self._planes[2 * kv_layer + 1]
        ops = torch.ops.ostinato
        if shared is None:
            ops.kv_write(key.transpose(1, 2)[0], value.transpose(1, 2)[0], k_cache, v_cache, slot_mapping)
        out = ops.paged_attention(
            query.transpose(1, 2)[0], k_cache, v_cache, block_tables, seq_lens, query_start, scale, window,
            float(softcap or 0.0),
        )  # fmt: skip
        return out[None], None

    def _experts(
        self, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        from transformers.integrations.moe import _default_apply_gate

        name = type(module).__name__
        unusual = [
            flag
            for flag, plain in (("has_gate", True), ("has_bias", False), ("is_transposed", False),
                                ("is_concatenated", True), ("has_post_expert_norm", False))
            if getattr(module, flag, plain) is not plain
        ]  # fmt: skip
        if unusual or getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
            raise ModelError(
                f"{name}: experts with {', '.join(unusual) or 'their own gate'} cannot be carried yet"
            )
        act = type(module.act_fn).__name__
        if act not in ("SiLU", "SiLUActivation"):
            raise ModelError(f"{name}: expert activation {act} cannot be carried; known: SiLU")
        return torch.ops.ostinato.moe_experts(
            hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
        )
