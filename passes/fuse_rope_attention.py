"""rope_kv_write, then the paged_attention of its queries  ->  ostinato::rope_attention.

Numerics: close (one kernel; on a CPU the same arithmetic).  For the decode plan only.
Both must work on the planes of one layer, and slots and block tables must be those of the step, as the op
reads what it wrote.  It stands where the write stood: what reads the planes in between reads the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ostinato.ops import paged_attention, rope_attention, rope_kv_write
from ostinato.passes import fuse_rope_kv_write
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Spelling, example, name_of
from ostinato.passes.matcher import full_arguments
from ostinato.passes.trace import Example
from ostinato.passes.values import argument

# any numbers that stand in no other place of the patterns
NUMBERS: dict[str, Example] = {"eps": 0.01234, "offset": 1.06789, "scale": 0.34567, "softcap": 12.3456}
STEP = ("slot_mapping", "block_tables", "seq_lens", "query_start")
# a proof names the last one first, and its type
TENSORS = (*STEP, "sinks", "k_weight", "q_weight", "v_cache", "k_cache", "sin", "cos", "v", "k", "q")
PROOF_NEW, PROOF_KEYS = 3, 4  # new tokens of the one sequence of a proof, and its length with them


class Kind(NamedTuple):
    """What of the two calls is neither a tensor nor a float."""

    round_first: bool
    interleaved: bool
    window: int


class FuseRopeAttention(FusionPass):
    name = "rope_attention"
    numerics = "close"
    needs = ("rope_kv_write",)
    anchors = (rope_kv_write.OP,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str:
        attention = attention_of(anchor)
        if attention is None:
            readers = " and ".join(sorted({name_of(user) for user in anchor.users})) or "nothing"
            return f"the rotated queries are read by {readers}, not by attention alone"
        # what both calls take has one name in both; the queries are those before the rotation
        reads, given = dict(full_arguments(attention)), dict(full_arguments(anchor))
        if any(reads[name] is not given[name] for name in ("k_cache", "v_cache")):
            return "the attention reads other planes than those written"
        arguments = {**reads, **given}
        if any(arguments[name].op != "placeholder" for name in STEP):
            return "slots or block tables are not those of the step"
        examples: dict[str, Example] = {
            name: example(arguments[name]) for name in TENSORS if arguments[name] is not None
        }
        pattern, replacement = functions(Kind(*(arguments[name] for name in Kind._fields)))
        return [
            Spelling(pattern, replacement, examples | NUMBERS, ends=(attention,), proof_inputs=proof_inputs())
        ]


def attention_of(node: fx.Node) -> fx.Node | None:
    """The attention that is the only reader of the rotated queries, as its queries."""
    (reader,) = node.users if len(node.users) == 1 else (None,)
    if reader is None or reader.target != paged_attention.OP or argument(reader, 0) is not node:
        return None
    return reader


@functools.cache
def functions(kind: Kind) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement; the same objects each time, so that they are traced once."""

    def calls(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
        slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor, query_start: Tensor,
        eps: float, offset: float, scale: float, softcap: float,
        q_weight: Tensor | None = None, k_weight: Tensor | None = None, sinks: Tensor | None = None,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
        """Arguments of the write, and those of the attention behind the planes."""
        norm = q_weight, k_weight, eps, offset, kind.round_first
        write = q, k, v, cos, sin, k_cache, v_cache, slot_mapping, *norm, kind.interleaved
        return write, (block_tables, seq_lens, query_start, scale, kind.window, softcap, sinks)

    def pattern(**given: Any) -> Tensor:
        write, read = calls(**given)
        return paged_attention.OP(rope_kv_write.OP(*write), given["k_cache"], given["v_cache"], *read)

    def replacement(**given: Any) -> Tensor:
        write, read = calls(**given)
        return rope_attention.OP(*write, *read)

    return pattern, replacement


@functools.cache
def proof_inputs() -> dict[str, Callable[[Tensor], Tensor]]:
    """A step of one sequence with an earlier token; other tokens are padding, other sequences empty."""

    def make_slots(slots: Tensor) -> Tensor:
        position = torch.arange(slots.numel(), dtype=slots.dtype) + (PROOF_KEYS - PROOF_NEW)
        return torch.where(position < PROOF_KEYS, position, -1)

    def make_tables(tables: Tensor) -> Tensor:
        return torch.arange(tables.shape[1], dtype=tables.dtype).expand_as(tables).clone()

    def make_lengths(lengths: Tensor) -> Tensor:
        return torch.zeros_like(lengths).index_fill_(0, torch.tensor([0]), PROOF_KEYS)

    def make_starts(starts: Tensor) -> Tensor:
        return torch.full_like(starts, PROOF_NEW).index_fill_(0, torch.tensor([0]), 0)

    makers = (make_slots, make_tables, make_lengths, make_starts)
    return {**fuse_rope_kv_write.proof_inputs("halves"), **dict(zip(STEP, makers, strict=True))}
