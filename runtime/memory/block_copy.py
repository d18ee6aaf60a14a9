"""Moves the content of KV blocks inside their planes, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DEFAULT_STAGING_BYTES = 8 << 20
"""Bytes of the copy in between: a device that is to give memory away has little to spare."""


@torch.no_grad()
def copy_blocks(
    planes: Sequence[torch.Tensor],
    moves: Sequence[tuple[int, int]],
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> None:
    """Copy block `from` to block `to` of every plane, for each (from, to); no block is both.

    Runs on the current stream, in order with the steps before and after; nothing is waited for.
    """
    if not moves:
        return
    pairs = torch.tensor(moves, dtype=torch.int64, device=planes[0].device)
    for plane in planes:
        block_bytes = plane[0].numel() * plane.element_size()
        step = max(1, staging_bytes // block_bytes)
        for begin in range(0, len(moves), step):
            part = pairs[begin : begin + step]
            plane.index_copy_(0, part[:, 1], plane.index_select(0, part[:, 0]))
