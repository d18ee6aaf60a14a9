"""Where the KV planes of a model lie: which buffers there are, and which part of which block a plane is.

split         K and V of a layer are two segments of one buffer, each plane contiguous (the default: a
              kernel reads whole runs). Where K and V differ in size each has a buffer of its own.
block_major   a layer is one buffer of one segment; a block holds its K, then its V.
packed        all layers share one buffer; a block holds K and V of every layer. One growth is one
              mapping, and one block is one piece for a transfer, but planes are strided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ostinato.graph.facts import KVLayer

Arrangement = Literal["split", "block_major", "packed"]


class BufferPlan(NamedTuple):
    """One `ElasticBuffer`."""

    segments: int
    block_bytes: int  # of a block in each segment


class PlanePlace(NamedTuple):
    """Where a plane is, and its shape behind [blocks, block_tokens]."""

    buffer: int  # index into `KVLayout.buffers`
    segment: int
    offset: int  # bytes from the start of a block of the segment
    tail: tuple[int, int]


class KVLayout(NamedTuple):
    """Buffers, and the planes k0, v0, k1, v1, ..."""

    buffers: tuple[BufferPlan, ...]
    planes: tuple[PlanePlace, ...]


def plan_layout(
    kv_layers: Sequence[KVLayer], itemsize: int, block_tokens: int, arrangement: Arrangement = "split"
) -> KVLayout:
    """Raises ValueError for a layer without heads or sizes, or an unknown arrangement."""
    buffers: list[BufferPlan] = []
    planes: list[PlanePlace] = []
    for layer in kv_layers:
        tails = [(layer.kv_heads, size) for size in (layer.k_size, layer.v_size)]
        k, v = (block_tokens * heads * size * itemsize for heads, size in tails)
        if min(k, v) < 1:
            raise ValueError(f"{layer!r}: heads and sizes must be at least 1")
        if arrangement == "split" and k == v:
            planes += [PlanePlace(len(buffers), s, 0, tail) for s, tail in enumerate(tails)]
            buffers.append(BufferPlan(2, k))
        elif arrangement == "split":  # segments of one buffer are equal, so each plane has its own
            planes += [PlanePlace(len(buffers) + s, 0, 0, tail) for s, tail in enumerate(tails)]
            buffers += [BufferPlan(1, k), BufferPlan(1, v)]
        elif arrangement in ("block_major", "packed"):
            begin = 0
            if arrangement == "packed" and buffers:
                begin = buffers[0].block_bytes
                buffers[0] = BufferPlan(1, begin + k + v)
            else:
                buffers.append(BufferPlan(1, k + v))
            last = len(buffers) - 1
            planes += [PlanePlace(last, 0, begin, tails[0]), PlanePlace(last, 0, begin + k, tails[1])]
        else:
            raise ValueError(f"arrangement={arrangement!r}: must be split, block_major or packed")
    return KVLayout(tuple(buffers), tuple(planes))
