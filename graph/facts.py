"""What a model is, as numbers, from its config and traced graph. No transformers here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ostinato.section import Section

Task = Literal["generate", "embed", "score"]
"""What a model is for."""
PoolingMode = Literal["mean", "last", "cls"]
"""What stands for a sequence: the mean of its rows, its last row or its first."""


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
    causal: bool = True


class PoolingFacts(Section):
    """What a model gives that answers with numbers for each whole input instead of generated tokens."""

    task: Literal["embed", "score"] = Field(description="a vector of an input, or a score of a pair of texts")
    pooling: PoolingMode
    size: int = Field(description="numbers in an answer")
    normalize: bool = Field(False, description="vectors have length 1")
    matryoshka: tuple[int, ...] = Field((), description="lengths that vectors may be cut to; empty: any")
    sigmoid: bool = Field(False, description="scores are squeezed into 0 to 1")
    causal: bool = Field(description="a token sees those before it only")
    first_position: int = Field(0, description="position of a sequence's first token")
    token_types: int = Field(0, description="kinds of tokens that the model tells apart; 0: none")


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
    pooling: PoolingFacts | None = None  # None: it generates
    expected_matches: dict[str, int] = Field(
        default_factory=dict, description="pass name -> matches it must reach"
    )

    def kv_token_bytes(self, itemsize: int) -> int:
        """Bytes of KV that one token takes in all layers."""
        return sum(layer.token_bytes(itemsize) for layer in self.kv_layers)
