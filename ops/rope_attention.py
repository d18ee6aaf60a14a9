"""rope_kv_write and paged_attention in one: q and new keys are rotated, K and V written, then attended to.

Shapes, types and rounding as of those two.  It writes the tokens that seq_lens covers, and their slots must
be where block_tables has them, as the attention would otherwise not read what was written.
On a GPU a step of at most as many tokens as sequences (decode), and of few, is one launch: a program of
paged_decode rotates its queries itself, and writes the new keys of its run before it reads them.  Other steps
are the two ops.
"""

from typing import Any

import torch
from torch import Tensor

from ostinato.ops import attention_choice, paged_attention, rope_kv_write
from ostinato.ops.check import check_dense_planes, check_types
from ostinato.ops.launch import KERNEL_FLOATS
from ostinato.ops.paged_decode import NewKeys, decode

MOST_TOGETHER = 32  # tokens: with more, the time of a launch is less than that of rotating in every program


def rope_attention_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    interleaved: bool,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    turned = rope_kv_write.rope_kv_write_reference(
        q_THD,
        k_TGD,
        v_TGE,
        cos_TR,
        sin_TR,
        k_cache,
        v_cache,
        slots_T,
        q_weight_D,
        k_weight_D,
        eps,
        offset,
        round_first,
        interleaved,
    )
    return paged_attention.paged_attention_reference(
        turned, k_cache, v_cache, block_tables_SM, seq_lens_S, query_start, scale, window, softcap, sinks_H
    )


def _check(*args: Any) -> None:
    """Of the arguments of the op, each part by its own op."""
    rope_kv_write._check(*args[:10])
    paged_attention._check(args[0], *args[5:7], *args[14:])


def _on_cpu(*args: Any) -> Tensor:
    _check(*args)
    return rope_attention_reference(*args)


def _launch(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    interleaved: bool,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
    *,
    choices: attention_choice.Choices | None = None,
) -> Tensor:
    """`choices`: of an artifact, as paged_attention takes them."""
    new_keys = NewKeys(
        k_TGD,
        v_TGE,
        cos_TR,
        sin_TR,
        slots_T,
        q_weight_D,
        k_weight_D,
        eps,
        offset,
        round_first,
        interleaved,
    )
    step = block_tables_SM, seq_lens_S, query_start
    num_tokens, num_sequences = q_THD.shape[0], seq_lens_S.shape[0]
    if num_tokens > min(num_sequences, MOST_TOGETHER) or block_tables_SM.numel() == 0:
        turned = rope_kv_write._launch(
            q_THD,
            k_TGD,
            v_TGE,
            cos_TR,
            sin_TR,
            k_cache,
            v_cache,
            slots_T,
            q_weight_D,
            k_weight_D,
            eps,
            offset,
            round_first,
            interleaved,
        )
        return paged_attention._launch(
            turned, k_cache, v_cache, *step, scale, window, softcap, sinks_H, choices=choices
        )
    _check(q_THD, *new_keys[:4], k_cache, v_cache, *new_keys[4:], *step, scale, window, softcap, sinks_H)
    check_types("rope_attention", KERNEL_FLOATS, q=q_THD)
    check_dense_planes("rope_attention", k_cache=k_cache, v_cache=v_cache)
    out = q_THD.new_empty((*q_THD.shape[:2], v_cache.shape[3]))
    if out.numel():
        decode(
            q_THD,
            k_cache,
            v_cache,
            *step,
            sinks_H,
            out,
            scale,
            window,
            softcap,
            singles_only=False,
            new_keys=new_keys,
        )
    return out


torch.library.define(
    "ostinato::rope_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor? q_weight, Tensor? k_weight, float eps, float offset, bool round_first, "
    "bool interleaved, Tensor block_tables, Tensor seq_lens, Tensor query_start, float scale, int window, "
    "float softcap, Tensor? sinks=None) -> Tensor",
)
torch.library.impl("ostinato::rope_attention", "CPU", _on_cpu)
torch.library.impl("ostinato::rope_attention", "CUDA", _launch)


@torch.library.register_fake("ostinato::rope_attention")
def _fake(*args: Any) -> Tensor:
    _check(*args)
    q_THD, v_cache = args[0], args[6]
    return q_THD.new_empty((q_THD.shape[0], q_THD.shape[1], v_cache.shape[3]))


OP = torch.ops.ostinato.rope_attention.default
