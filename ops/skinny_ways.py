"""How a skinny layer is computed on a GPU: what was measured for its shape, else what reasoning says.

A few tokens go through the Triton kernels (`Config`), up to 256 through CUDA C++ on Hopper (`Tile`), and what
neither takes, or the library does faster, goes through the parts: the norm, F.linear, the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.ops import tuning, wgmma_linear
from ostinato.ops.skinny_rows import MAX_TOKENS, Config
from ostinato.ops.wgmma_linear import Tile

Way = Config | Tile | None  # None: by parts
FEW = 2  # tokens for which multiply-adds in float32 keep up with memory; of 3, tiles were as fast on an H200


def most_tokens(capability: int) -> int:
    """Tokens of a step for which a GPU has kernels of ours; more go through the parts."""
    return wgmma_linear.MAX_TOKENS if capability == 90 else MAX_TOKENS


def chosen_way(
    op: str,
    x_TK: Tensor,
    weight_NK: Tensor,
    activation: str,
    choices: tuning.Choices | None,
    default: Callable[[int, int, int, torch.dtype], Config],
) -> Way:
    """The way for these rows. `choices`: instead of the table of the GPU; `default`: the op's own rule."""
    num_tokens, width = x_TK.shape
    num_outputs = weight_NK.shape[0] // (2 if activation else 1)
    if width == 0:
        return None
    takes_tiles = wgmma_linear.can_launch(x_TK, weight_NK, activation)
    measured = tuning.choice(op, num_tokens, num_outputs, width, x_TK.dtype, choices)
    if measured == tuning.BY_PARTS:
        return None
    if measured is not None and measured.config is not None:
        return Config(**measured.config)
    if measured is not None and measured.tile is not None and takes_tiles:
        return Tile(**measured.tile)
    places = wgmma_linear.multiprocessors(x_TK.get_device()) if takes_tiles else 0
    return default_way(num_tokens, num_outputs, width, x_TK.dtype, activation != "", places, default)


def default_way(
    num_tokens: int,
    num_outputs: int,
    width: int,
    dtype: torch.dtype,
    is_gated: bool,
    places: int,
    default: Callable[[int, int, int, torch.dtype], Config],
) -> Way:
    """What reasoning says. `places`: multiprocessors that take tiles, 0: the layer has none."""
    if places and FEW < num_tokens <= wgmma_linear.MAX_TOKENS:
        return wgmma_linear.default_tile(num_tokens, num_outputs, is_gated, places)
    return default(num_tokens, num_outputs, width, dtype) if num_tokens <= MAX_TOKENS else None


def choice_of(way: Way) -> tuning.Choice:
    """A way as tables have it."""
    if way is None:
        return tuning.BY_PARTS
    kind = "tile" if isinstance(way, Tile) else "config"
    return tuning.Choice(**{kind: way._asdict()})
