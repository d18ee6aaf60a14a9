"""paged_attention for many new tokens on Hopper's tensor cores: the CUDA side of its prefill.

paged_attention says what is computed, and what the letters mean; this kernel does so for bf16 heads of 128
values without window, softcap and sinks, in blocks of 8 to 128 tokens.  Keys and values come by the copy
engine (TMA) straight from the blocks of the cache, a tile of 128 at a time; scores stay in registers, and the
exponentials of one tile are taken while the tensor cores multiply with others (arXiv:2407.08608).  Softmax in
float32, its shares rounded to bf16 before they meet the values, as the Triton kernel does.  Needs sm_90a.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ostinato.ops.attention_scores import LOG2_E
from ostinato.ops.cuda_kernels import Boxes, CudaKernel, box_map
from ostinato.ops.hopper import HEADER, is_hopper, multiply
from ostinato.ops.launch import on_device

MIN_TOKENS = 256  # of a step; fewer leave multiprocessors without a tile
_ROWS, _SIZE = 128, 128  # query rows of a tile, values of a head
_STAGES = 2
_TILE_BYTES = _ROWS * _SIZE * 2
_GROUPS = (1, 2, 4, 8, 16, 32)
_BLOCKS = (8, 16, 32, 64, 128)


def headers(constants: Mapping[str, int]) -> dict[str, str]:
    """What the source includes."""
    return {"hopper.cuh": HEADER.read_text() + multiply(_ROWS, False) + _multiply_shares()}


def _multiply_shares() -> str:
    """The instruction whose first operand is in registers and whose second is turned while it is read."""
    count = _SIZE // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    shares = ", ".join(f"%{count + i}" for i in range(4))
    return (
        f"__device__ __forceinline__ void multiply_shares(float (&sums)[{count}], u32 a, u32 b, u32 c, "
        'u32 d, u64 values) { asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{_SIZE}k16.f32.bf16.bf16 "
        f'{{{registers}}}, {{{shares}}}, %{count + 4}, p, 1, 1, 1; }}" '
        f': {outputs} : "r"(a), "r"(b), "r"(c), "r"(d), "l"(values)); }}\n'
    )


KERNEL = CudaKernel(
    Path(__file__).with_suffix(".cu"),
    "wgmma_prefill",
    ("map", "map", "map", *["ptr"] * 4, *["i32"] * 5, "fp32"),
    headers,
    module=__name__,
    name="KERNEL",
)


def can_launch(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, window: int, softcap: float, sinks_H: Tensor | None
) -> bool:
    """Whether the kernel takes these operands, on this GPU."""
    group = q_THD.shape[1] // k_cache.shape[2]
    planes = (k_cache, v_cache)
    return (
        is_hopper(q_THD)
        and q_THD.shape[0] >= MIN_TOKENS
        and q_THD.dtype == torch.bfloat16
        and (window, softcap, sinks_H) == (0, 0.0, None)
        and q_THD.shape[2] == v_cache.shape[3] == _SIZE
        and group in _GROUPS
        and k_cache.shape[1] in _BLOCKS
        and all(plane.data_ptr() % 16 == 0 and plane.stride(3) == 1 for plane in (*planes, q_THD[:, :, None]))
        and all(stride % 8 == 0 for plane in (*planes, q_THD) for stride in plane.stride()[:-1])
    )


def launch(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_start: Tensor,
    out_THE: Tensor,
    scale: float,
    *,
    min_new: int,
) -> None:
    """Fill `out`, dense, for the sequences of at least `min_new` tokens, and the rows past the last sequence.

    Operands as `can_launch` wants them; indices are copied where they are not int32, or lie apart.
    """
    num_tokens, heads, _ = q_THD.shape
    _, block_tokens, kv_heads, _ = k_cache.shape
    num_seqs, group = seq_lens_S.shape[0], heads // kv_heads
    queries = _ROWS // group
    tables = block_tables_SM.int()
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    # named, for a copy must live until the launch: the kernel has its address alone
    lengths, starts = seq_lens_S.int().contiguous(), query_start.int().contiguous()
    # whole tiles, a last one of every sequence that can have some, and one behind the sequences
    num_tiles = num_tokens // queries + min(num_seqs, num_tokens // min_new) + 1
    constants = {"GROUP": group, "QUERIES": queries, "B": block_tokens, "STAGES": _STAGES, "HALF": 0}
    token_strides = q_THD.stride()
    args = (
        box_map(
            Boxes(
                q_THD.data_ptr(), (_SIZE, heads, num_tokens), (token_strides[1], token_strides[0]),
                (64, group, queries), q_THD.dtype,
            )
        ),
        *[_plane_map(plane) for plane in (k_cache, v_cache)],
        out_THE.data_ptr(),
        tables.data_ptr(),
        lengths.data_ptr(),
        starts.data_ptr(),
        num_seqs,
        num_tokens,
        tables.stride(0) if num_seqs > 1 else tables.shape[1],
        heads,
        min_new,
        scale * LOG2_E,
    )  # fmt: skip
    shared = _TILE_BYTES * (1 + 2 * _STAGES) + 8 * (1 + 4 * _STAGES)
    with on_device(q_THD):
        KERNEL.launch((kv_heads, num_tiles), args, constants, threads=384, shared=shared)


def _plane_map(plane: Tensor) -> bytes:
    blocks, block_tokens, kv_heads, size = plane.shape
    by_block, by_token, by_head, _ = plane.stride()
    shape = size, kv_heads, block_tokens, blocks
    return box_map(
        Boxes(plane.data_ptr(), shape, (by_head, by_token, by_block), (64, 1, block_tokens, 1), plane.dtype)
    )
