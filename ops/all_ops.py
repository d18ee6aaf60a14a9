"""Importing this registers every custom operator that a program may call."""

from ostinato.ops import (  # noqa: F401
    add_rms_norm,
    gelu_tanh_mul,
    kv_write,
    mean_rows,
    moe_experts,
    paged_attention,
    rms_norm,
    rope_attention,
    rope_kv_write,
    rope_table,
    sample,
    sequence_mask,
    silu_mul,
    skinny_gated,
    skinny_linear,
    take_pending,
    token_scores,
    varlen_attention,
)
