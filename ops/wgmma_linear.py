"""y = act(x W^T) + bias + residual on Hopper's tensor cores, any number of tokens: the CUDA side of two ops.

Shapes: T tokens, K columns, N outputs; x [T, K], weight [N, K] (gated: [2N, K], gates first), bias [N],
residual and y [T, N].
skinny_linear and skinny_gated say what is computed; `wgmma_linear.cu` computes it.  A block owns a tile of
tokens (up to 64 for each of its warpgroups) by weight rows; the copy engine (TMA) fills a ring of stages with
64 columns of both.  Weights are asked for before the kernel that makes x has ended, up to 200 KiB on each
multiprocessor: while the kernels between two products run, memory stays busy.
`split` blocks of a cluster share the columns of a tile and add their sums through each other's shared memory,
in a fixed order; `share` blocks have different tokens, and each loads a part of the weights for all.
How many stages fit follows from the percentage of L1 that the step's launches have (`STORE.carveout`), which
so decides the variant, too.
Types: bf16 and fp16, sums in float32, one rounding at the end.  Needs sm_90a.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.cuda_kernels import MAX_SHARED, CudaKernel, Matrix, can_map, matrix_map
from ostinato.ops.hopper import HEADER, is_hopper, multiply
from ostinato.ops.kernel_store import STORE

ACTIVATIONS = ("", "silu", "gelu_tanh")
MAX_TOKENS = 256  # above, the library is faster on an H200
_COLUMNS = 64  # of a stage
_MAX_STAGES = 32


class Tile(NamedTuple):
    """How a launch splits its work."""

    rows: int  # of the weight, for a block: a multiple of 8, at most 256; half of them gates in a gated layer
    groups: int = 1  # warpgroups of a block, with 64 tokens each: 1 to 4
    split: int = 1  # blocks that share the columns: 1, 2, 4 or 8
    share: int = 1  # blocks that share the weights, with other tokens each: 1 or 2


# What the tuner tries, by warpgroups that the tokens fill. On an H200 one block owns a multiprocessor, and
# 128 of 132 have one: 6144, 4096 and 28672 rows are 128 times 48, 32 and 224. Several small blocks on one
# were slower (docs/log.md).
CANDIDATES = {
    1: (Tile(96, 1, 2), Tile(64, 1, 2), Tile(48), Tile(32), Tile(112), Tile(224), Tile(128)),
    2: (Tile(96, 2, 2), Tile(64, 2, 2), Tile(48, 2), Tile(112, 2), Tile(224, 2), Tile(128, 2)),
    3: (Tile(96, 3, 2), Tile(64, 3, 2), Tile(48, 3), Tile(112, 3), Tile(192, 3), Tile(128, 3)),
    4: (
        Tile(96, 4, 2),
        Tile(64, 4, 2),
        Tile(112, 4),
        Tile(96, 2),
        Tile(128, 2, 2),
        Tile(224, 2),
        Tile(224, 2, 1, 2),
        Tile(256, 2, 1, 2),
        Tile(128, 2, 1, 2),
    ),
}


def headers(constants: Mapping[str, int]) -> dict[str, str]:
    """What the source includes."""
    return {"hopper.cuh": HEADER.read_text(), "wgmma.h": multiply(constants["BN"], constants["HALF"] == 1)}


KERNEL = CudaKernel(
    Path(__file__).with_suffix(".cu"),
    "wgmma_linear",
    ("map", "map", "ptr", "ptr", "ptr", *["i32"] * 6),
    headers,
    module=__name__,
    name="KERNEL",
)


def can_launch(x_TK: Tensor, weight_NK: Tensor, activation: str) -> bool:
    """Whether the kernel takes these operands, on this GPU."""
    num_rows, width = weight_NK.shape
    outputs = num_rows // 2 if activation else num_rows
    return (
        is_hopper(x_TK)
        and outputs % 8 == 0
        and width % 8 == 0
        and can_map(_matrix(weight_NK))
        and can_map(_matrix(x_TK))
    )


def check_tile(op: str, tile: Tile, is_gated: bool) -> None:
    """Raise ValueError for a tile that no launch can have."""
    outputs = tile.rows // 2 if is_gated else tile.rows
    halves = 2 if is_gated or tile.share == 2 else 1
    wrong = {
        "rows": tile.rows % (8 * halves) != 0 or not 8 <= tile.rows <= 256,
        "groups": not 1 <= tile.groups <= 4,
        "split": tile.split not in (1, 2, 4, 8) or outputs % (8 * tile.split) != 0,
        "share": tile.share not in (1, 2),
        "split and share": tile.split * tile.share > 8,  # blocks that a cluster may have on every GPU
        # registers: a thread holds rows / 2 sums, and three groups leave it 128, four 96
        "rows and groups": tile.rows > {3: 192, 4: 128}.get(tile.groups, 256),
    }
    if said := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(
            f"{op}: {tile} cannot be launched{' for a gated layer' * is_gated}: {', '.join(said)}"
        )


def default_tile(num_tokens: int, num_outputs: int, is_gated: bool, places: int) -> Tile:
    """Chosen by reasoning, where nothing was measured: every multiprocessor has weights on their way.

    `places`: multiprocessors, each for one block. Two blocks share the columns where that lets each have more
    rows, since every block loads all its tokens.
    """
    groups = min(-(-num_tokens // 64), 4)
    most = {3: 192, 4: 128}.get(groups, 224)
    num_rows = 2 * num_outputs if is_gated else num_outputs
    unit = 16 if is_gated else 8
    each = -(-num_rows // (places * unit)) * unit  # rows of a block, if all had the same
    if each > 80 or is_gated:
        return Tile(min(each, most if each <= 2 * most else 128), groups)
    both = min(-(-2 * num_rows // (places * 16)) * 16, most)
    return Tile(max(both, 16), groups, split=2)


def _matrix(rows: Tensor) -> Matrix:
    count, columns = rows.shape
    stride = rows.stride(0) if count > 1 else -(-columns // 8) * 8  # that of a lone row means nothing
    return Matrix(rows.data_ptr(), count, columns, stride, rows.dtype)


def _in_pairs(rows: Tensor | None) -> Tensor | None:
    """What is added to outputs is read two values at a time: a copy of what lies between them."""
    if rows is None or (rows.stride(-1) == 1 and rows.data_ptr() % 4 == 0 and _stride(rows) % 2 == 0):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _stride(rows: Tensor) -> int:
    return rows.stride(0) if rows.dim() == 2 and len(rows) > 1 else 0


def _stage_bytes(tile: Tile, token_rows: int) -> int:
    return (token_rows + tile.rows) * _COLUMNS * 2


def _ring(tile: Tile, groups: int, token_rows: int) -> tuple[int, int]:
    """Stages, and bytes behind them. Raises ValueError where there is no room for two."""
    stage_bytes = _stage_bytes(tile, token_rows)
    spare = max(0, 64 * 128 - stage_bytes)  # fewer tokens than a multiplication reads: it runs on behind
    room = MAX_SHARED * STORE.carveout // 100 - 1024  # what other kernels of the step leave to shared memory
    stages = min((room - spare) // (stage_bytes + 16), _MAX_STAGES)
    if stages < 2:  # a stage is free again once the next one is there
        raise ValueError(
            f"wgmma_linear: {tile} leaves room for {stages} stages of 2 that it needs; take fewer rows"
        )
    if tile.split > 1:  # the ring takes the sums of all threads at the end
        spare = max(spare, groups * 64 * tile.rows * 4 - stages * stage_bytes)
    return stages, spare


def launch(
    x_TK: Tensor,
    weight_NK: Tensor,
    out_TN: Tensor,
    tile: Tile,
    *,
    bias_N: Tensor | None = None,
    residual_TN: Tensor | None = None,
    activation: str = "",
) -> None:
    """Fill `out`, dense and not empty. Operands as `can_launch` wants them, on the current device.

    Raises ValueError for a tile that cannot be launched, or has no room for two stages.
    """
    num_tokens, num_out = out_TN.shape
    is_gated = activation != ""
    check_tile("wgmma_linear", tile, is_gated)
    bias_N, residual_TN = _in_pairs(bias_N), _in_pairs(residual_TN)
    groups = min(tile.groups, -(-num_tokens // 64))
    token_rows = (
        64 * groups if groups > 1 else next(size for size in (8, 16, 32, 64) if size >= min(num_tokens, 64))
    )
    token_tiles = -(-num_tokens // (64 * groups))
    share = tile.share if token_tiles > 1 else 1
    stages, spare = _ring(tile, groups, token_rows)
    outputs = tile.rows // 2 if is_gated else tile.rows
    tiles, cluster = -(-num_out // outputs), tile.split * share
    items = -(-token_tiles // share) * tiles
    clusters = items if tile.split > 1 else min(items, multiprocessors(x_TK.get_device()) // cluster)
    constants = {
        "WGS": groups,
        "ROWS": token_rows,
        "BN": tile.rows,
        "STAGES": stages,
        "SPARE": spare,
        "SPLIT": tile.split,
        "SHARE": share,
        "ACT": ACTIVATIONS.index(activation),
        "BIAS": int(bias_N is not None),
        "RESIDUAL": int(residual_TN is not None),
        "HALF": int(x_TK.dtype == torch.float16),
    }
    args = (
        matrix_map(_matrix(x_TK), token_rows),
        matrix_map(_matrix(weight_NK), tile.rows // 2 if is_gated or share == 2 else tile.rows),
        out_TN.data_ptr(),
        0 if bias_N is None else bias_N.data_ptr(),
        0 if residual_TN is None else residual_TN.data_ptr(),
        num_tokens,
        num_out,
        0 if residual_TN is None else _stride(residual_TN),
        -(-x_TK.shape[1] // _COLUMNS),
        token_tiles,
        tiles,
    )
    KERNEL.launch(
        (clusters * cluster,),
        args,
        constants,
        threads=groups * 128 + 32,
        shared=stages * (_stage_bytes(tile, token_rows) + 16) + spare,
    )


@cache
def multiprocessors(device: int) -> int:
    """Of a GPU, 132 on an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count
