"""paged_attention by FlashAttention-3, where the package `tokenspeed-fa3` is installed: no step needs it.

paged_attention says what is computed; the library does so for fp16 and bf16 on Hopper (sm_90), for K and V
heads of one size, without window, softcap and sinks: it reads whole tiles of keys, also those before a
window, whose blocks may be gone.  Blocks of at most 64 tokens: larger ones it fetches whole by TMA, with what
lies behind a sequence's last key, where a NaN would spread.
Its kernels are binaries: nothing is compiled.  The module is imported when `unavailable_reason` is asked.
Sources: arXiv:2407.08608, github.com/Dao-AILab/flash-attention (BSD-3).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from ostinato.ops.kernel_store import capability_here
from ostinato.ops.launch import jit, on_device, tl

PACKAGE, EXTRA = "tokenspeed-fa3", "fa3"
_MODULE = "flash_attn_3._C"  # registers torch.ops.flash_attn_3
MOST_SIZE, MOST_BLOCK = 256, 64
_ROWS = 16  # rows of a program that writes zeros


@cache
def installed_version() -> str:
    """Of the package; empty: it is not installed. Imports nothing of it."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


@cache
def unavailable_reason() -> str | None:
    """Why nothing can be launched here; None: the library is loaded."""
    version = installed_version()
    if not version:
        return f"{PACKAGE} is not installed; pip install 'ostinato[{EXTRA}]'"
    if (here := capability_here()) != 90:
        return f"{PACKAGE} is for compute capability 90, this GPU has {here}"
    try:
        import_module(_MODULE)
        _forward()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"{PACKAGE} {version} cannot be loaded with torch {torch.__version__}: {error}"
    return None


def refusal(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, window: int, softcap: float, sinks_H: Tensor | None
) -> str | None:
    """Why the library does not take these operands; None: it does."""
    size, v_size, block = q_THD.shape[2], v_cache.shape[3], k_cache.shape[1]
    if q_THD.dtype not in (torch.float16, torch.bfloat16):
        return f"{q_THD.dtype} is neither float16 nor bfloat16"
    if window or softcap or sinks_H is not None:
        return "a window, softcap or sinks"
    if size != v_size or size % 8 or size > MOST_SIZE:
        return f"heads of {size} and {v_size} values; it takes equal multiples of 8 up to {MOST_SIZE}"
    if block > MOST_BLOCK:
        return f"blocks of {block} tokens; it takes up to {MOST_BLOCK}"
    tensors = q_THD[:, None], k_cache, v_cache
    if any(x.stride(3) != 1 or x.data_ptr() % 16 or any(s % 8 for s in x.stride()[:3]) for x in tensors):
        return "strides or addresses that are no multiples of 16 bytes"
    return None


@jit(do_not_specialize=["num_tokens", "num_seqs"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    out, query_start, num_tokens, num_seqs, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros in the rows past the last sequence."""
    stop = tl.load(query_start + num_seqs).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    at = first * WIDTH + tl.arange(0, BLOCK)
    for start in range(0, tl.where(first + ROWS > stop, ROWS * WIDTH, 0), BLOCK):
        is_rest = (start + at >= stop * WIDTH) & (start + at < num_tokens.to(tl.int64) * WIDTH)
        is_mine = start + at < (first + ROWS) * WIDTH
        tl.store(out + start + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=is_rest & is_mine)


def launch(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    out_THE: Tensor,
    scale: float,
) -> None:
    """Fill `out`, which is contiguous, for every sequence and the rows past the last one.

    Operands without `refusal`, and `unavailable_reason` was asked before.
    """
    num_tokens, num_seqs = q_THD.shape[0], seq_lens_S.shape[0]
    tables = block_tables_SM.int()
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    starts = query_start.int().contiguous()
    # The most new tokens of one sequence: an upper bound that only chooses among kernels.  With 1 the mask
    # would be dropped for some head sizes, and nobody has said that no sequence has two.
    most_new = 2 if num_tokens <= num_seqs else num_tokens
    with on_device(q_THD):
        _kernel[(-(-num_tokens // _ROWS),)](
            out_THE,
            starts,
            num_tokens,
            num_seqs,
            WIDTH=out_THE.shape[1] * out_THE.shape[2],
            ROWS=_ROWS,
            BLOCK=1024,
            num_warps=4,
            num_stages=1,
        )
        _forward()(
            q_THD,
            k_cache,
            v_cache,
            out=out_THE,
            cu_seqlens_q=starts,
            seqused_k=seq_lens_S.int().contiguous(),
            max_seqlen_q=most_new,
            page_table=tables,
            softmax_scale=scale,
            is_causal=True,
            num_splits=1,  # more need a bound on new tokens that is true, and memory for each
        )


def _forward() -> Any:
    return torch.ops.flash_attn_3.fwd.default
