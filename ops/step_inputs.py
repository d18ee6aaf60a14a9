"""The tensors that change with every step: the calling conventions of graphs, programs and runners.

T tokens of the whole step (all sequences, one after another), B sequences, M block-table width,
R rows of the hidden state whose logits are wanted (0 <= R <= T).
"""

from typing import NamedTuple

from torch import Tensor


class StepInputs(NamedTuple):
    """Everything a step needs besides weights and KV planes."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]; position of each token in its sequence
    slot_mapping: Tensor  # int64 [T]; block * block_tokens + offset where K and V go; -1 writes nothing
    block_tables: Tensor  # int32 [B, M]; entries past a sequence's blocks are never read
    seq_lens: Tensor  # int32 [B]; context length with this step's tokens
    query_start: Tensor  # int32 [B + 1]; first token of each sequence in the step; last entry is T
    logit_rows: Tensor  # int64 [R]


# K and V planes of a layer are two tensors [num_blocks, block_tokens, kv_heads, head_size];
# a graph takes them flat, k of layer 0, v of layer 0, k of layer 1, ... after the step inputs.


class PoolInputs(NamedTuple):
    """A step of a model that gives one vector per sequence. Every sequence is whole, so nothing is cached."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]; position of each token in its sequence
    token_types: Tensor  # int64 [T]; which part of a pair a token is of: 0 or 1
    query_start: Tensor  # int32 [B + 1], in host memory; first token of each sequence; last entry is T
    rows: Tensor  # int64 [B]; the row of each sequence that stands for it: its first or its last
