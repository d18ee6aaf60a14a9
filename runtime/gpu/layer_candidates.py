"""Which ways of computing a skinny layer are worth a measurement, for a number of tokens.

Compiling is most of what a measurement costs, so each list has what has won somewhere, and no more.
- One token: multiply-adds. Tiles were faster alone and slower in an engine (docs/log.md).
- Two: multiply-adds, tensor cores, tiles; without tiles so up to four, then tensor cores.
- More: tiles, and up to 8 tokens tensor cores.
The default comes first, the parts last: cuBLAS, with norm, sum and activation apart.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ostinato.ops import skinny_gated, skinny_linear, wgmma_linear
from ostinato.ops.skinny_rows import MAX_TOKENS, Config, check_config
from ostinato.ops.skinny_ways import FEW, Way, default_way
from ostinato.ops.wgmma_linear import Tile, check_tile

OPS: dict[str, Any] = {"skinny_linear": skinny_linear, "skinny_gated": skinny_gated}
_MOST_BY_CORES = 8  # tokens, where there are tiles: no product of 16 was faster by mma than by wgmma


def candidates(
    op: str, num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype, places: int
) -> list[Way]:
    """Each can be launched. `places`: multiprocessors that take tiles, 0: the layer has none."""
    module, is_gated = OPS[op], op == "skinny_gated"
    found: list[Way] = [default_way(num_tokens, num_outputs, width, dtype, is_gated, places, module._config)]
    for config in module.CANDIDATES if num_tokens <= MAX_TOKENS else ():
        if _is_worth_it(config, num_tokens, dtype, places > 0):
            with suppress(ValueError):
                check_config(op, config, dtype, num_tokens)
                found.append(config)
    if places and 1 < num_tokens <= wgmma_linear.MAX_TOKENS:
        found += _tiles(op, num_tokens, num_outputs, is_gated, places)
    return list(dict.fromkeys([*found, None]))


def _is_worth_it(config: Config, num_tokens: int, dtype: torch.dtype, has_tiles: bool) -> bool:
    if config.by_tensor_cores:
        if has_tiles:
            return 1 < num_tokens <= _MOST_BY_CORES and config.split == 1 and config.num_warps == 4
        return num_tokens > 1
    if num_tokens == 1:
        return True
    return config.prefetch == 0 and (num_tokens <= (FEW if has_tiles else 4) or dtype == torch.float32)


def _tiles(op: str, num_tokens: int, num_outputs: int, is_gated: bool, places: int) -> list[Tile]:
    """Those of the op's list, and those that give each multiprocessor one block."""
    groups = min(-(-num_tokens // 64), 4)
    num_rows, unit = (2 * num_outputs, 16) if is_gated else (num_outputs, 8)
    wanted = [*wgmma_linear.CANDIDATES[groups]]
    for split in (1, 2, 4):
        each = -(-split * num_rows // (places * unit * split)) * unit * split
        wanted.append(Tile(each, groups, split))
    found = []
    for tile in wanted:
        with suppress(ValueError):
            check_tile(op, tile, is_gated)
            found.append(tile)
    return found
