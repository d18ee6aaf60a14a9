"""Input tokens of a step that the step before it has sampled: read on the device, where they already are.

Shapes: token_ids [T] int64, last_tokens [N] int64, the newest token of each of N request slots.
token_ids[t] < 0 stands for slot -1 - token_ids[t] and becomes last_tokens of that slot, in place; the others
stay.  A slot past N is a caller's error, and unchecked on a GPU.
"""

import torch
from torch import Tensor

from ostinato.ops.check import check_device, check_shapes, check_types
from ostinato.ops.launch import jit, on_device, tl

BLOCK = 256  # tokens of one program


def take_pending_reference(token_ids_T: Tensor, last_tokens_N: Tensor) -> None:
    pending = token_ids_T < 0
    token_ids_T[pending] = last_tokens_N[-1 - token_ids_T[pending]]


@jit(do_not_specialize=["num_tokens"])
def _kernel(token_ids, last_tokens, num_tokens, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + at, mask=at < num_tokens, other=0)
    pending = ids < 0
    newest = tl.load(last_tokens + (-1 - ids), mask=pending, other=0)
    tl.store(token_ids + at, newest, mask=pending)


def _check(token_ids_T: Tensor, last_tokens_N: Tensor) -> None:
    check_shapes("take_pending", token_ids=(token_ids_T, "T"), last_tokens=(last_tokens_N, "N"))
    check_types("take_pending", (torch.int64,), token_ids=token_ids_T, last_tokens=last_tokens_N)
    check_device("take_pending", "token_ids", token_ids_T, "last_tokens", last_tokens_N)
    for name, tensor in (("token_ids", token_ids_T), ("last_tokens", last_tokens_N)):
        if tensor.dim() == 1 and tensor.stride(0) != 1:
            raise ValueError(f"take_pending: {name} has stride {tensor.stride(0)}; it must be contiguous")


def _on_cpu(token_ids_T: Tensor, last_tokens_N: Tensor) -> None:
    _check(token_ids_T, last_tokens_N)
    take_pending_reference(token_ids_T, last_tokens_N)


def _launch(token_ids_T: Tensor, last_tokens_N: Tensor) -> None:
    _check(token_ids_T, last_tokens_N)
    count = token_ids_T.numel()
    if count == 0:
        return
    with on_device(token_ids_T):
        _kernel[(-(-count // BLOCK),)](token_ids_T, last_tokens_N, count, BLOCK=BLOCK, num_warps=4)


torch.library.define("ostinato::take_pending", "(Tensor(a!) token_ids, Tensor last_tokens) -> ()")
torch.library.impl("ostinato::take_pending", "CPU", _on_cpu)
torch.library.impl("ostinato::take_pending", "CUDA", _launch)


@torch.library.register_fake("ostinato::take_pending")
def _fake(token_ids_T: Tensor, last_tokens_N: Tensor) -> None:
    _check(token_ids_T, last_tokens_N)


OP = torch.ops.ostinato.take_pending.default
