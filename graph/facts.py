"""What a model is, as numbers, from its config and traced graph. No transformers here."""

from __future__ import annotations

from pydantic import Field

from ostinato.section import Section


class KVLayer(Section):
    """One pair of KV planes, [num_blocks, block_tokens, kv_heads, k_size] and [..., v_size]."""

    kv_heads: int
    k_size: int
    v_size: int

    def token_bytes(self, itemsize: int) -> int:
        """Bytes that one token takes in both planes."""
        return self.kv_heads * (self.k_size + self.v_size) * itemsize


class AttentionFact(Section):
    """One attention call as traced: the numbers came through transformers' own attention interface."""

    layer: int
    kv_layer: int  # index into `kv_layers`; layers that share KV have the same one
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int = 0  # 0: full attention
    softcap: float = 0.0  # 0: none


class ModelFacts(Section):
    """Everything the runtime must know about a model besides its graph and weights."""

    architecture: str
    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    kv_layers: tuple[KVLayer, ...]
    attention: tuple[AttentionFact, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    expected_matches: dict[str, int] = Field(
        default_factory=dict, description="pass name -> matches it must reach"
    )

    def kv_token_bytes(self, itemsize: int) -> int:
        """Bytes of KV that one token takes in all layers."""
        return sum(layer.token_bytes(itemsize) for layer in self.kv_layers)
