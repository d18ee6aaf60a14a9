"""The mask of a step of whole sequences for attention that takes one: a token sees those of its sequence.

Shapes: T tokens of all sequences one after another, S sequences; token_ids [T] (only its size and device are
used), query_start [S + 1], int32 or int64, in host memory or on the device; returns [T, T] in `dtype`: 0
where both tokens are of one sequence, else the type's least number, to be added to scores.
Quadratic in T, so for models whose attention cannot be `varlen_attention`.
Types: dtype fp16, bf16, fp32, fp64.
"""

import torch
from torch import Tensor

from ostinato.ops.check import INTEGERS, check_shapes, check_types


def sequence_mask_reference(token_ids_T: Tensor, query_start: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, device = token_ids_T.shape[0], token_ids_T.device
    lengths = query_start.diff().to(device)
    sequence_T = torch.repeat_interleave(lengths, output_size=tokens)
    apart = sequence_T[:, None] != sequence_T[None, :]
    return torch.zeros(tokens, tokens, dtype=dtype, device=device).masked_fill_(apart, torch.finfo(dtype).min)


def _launch(token_ids_T: Tensor, query_start: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference, on any device."""
    _check(token_ids_T, query_start)
    return sequence_mask_reference(token_ids_T, query_start, dtype)


def _check(token_ids_T: Tensor, query_start: Tensor) -> None:
    check_shapes("sequence_mask", token_ids=(token_ids_T, "T"), query_start=(query_start, "S+1"))
    check_types("sequence_mask", INTEGERS, token_ids=token_ids_T)
    check_types("sequence_mask", INTEGERS, query_start=query_start)


torch.library.define(
    "ostinato::sequence_mask", "(Tensor token_ids, Tensor query_start, ScalarType dtype) -> Tensor"
)
torch.library.impl("ostinato::sequence_mask", "CUDA", _launch)
torch.library.impl("ostinato::sequence_mask", "CPU", _launch)


@torch.library.register_fake("ostinato::sequence_mask")
def _fake(token_ids_T: Tensor, query_start: Tensor, dtype: torch.dtype) -> Tensor:
    _check(token_ids_T, query_start)
    tokens = token_ids_T.shape[0]
    return torch.empty(tokens, tokens, dtype=dtype, device=token_ids_T.device)


OP = torch.ops.ostinato.sequence_mask.default
