"""Rotary embedding of q and k, then kv_write  ->  ostinato::rope_kv_write.  Numerics: close (rounds once).

Rotated pairs are halves of the head (llama) or neighbours (glm, cohere); the whole head or its first part
rotates; heads stand before tokens or after them; tables may be float32 (olmo2) and the sum may be taken in
float32 (cohere, ernie). The tables must be what the op reads: both halves equal, or neighbours equal, as seen
from how they were made.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from ostinato.ops import add_rms_norm, kv_write, paged_attention, rms_norm, rope_kv_write
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Match, Spelling, example
from ostinato.passes.values import argument, is_tensor, tensor

aten = torch.ops.aten


Table = Literal["halves", "neighbours", "repeated"]
Upcast = Literal["never", "first", "late"]


class Layout(NamedTuple):
    """How a model spells the rotation."""

    heads_dim: int  # where the heads stand: 1 in [1, H, T, D], 2 in [1, T, H, D]
    rotated: int  # first values of a head that rotate
    is_interleaved: bool
    table: Table  # equal entries of a table; repeated: its first half, in the graph
    upcast: Upcast = "never"  # x in float32; late: after its halves changed places
    has_own_tables: bool = False  # q and k unsqueeze the tables each for themselves


class FuseRopeKVWrite(FusionPass):
    name = "rope_kv_write"
    numerics = "close"
    anchors = (kv_write.OP,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str:
        k, k_cache = argument(anchor, 0), argument(anchor, 2)
        readers = [user for user in k_cache.users if user.target == paged_attention.OP and anchor < user]
        if not readers:
            return "no attention reads the written keys"
        if _is_norm(k):
            return "the keys are normed after the rotation, or not rotated"
        above = _above(k)
        table = next((node for node in above if node.target == aten.unsqueeze.default), None)
        if table is None:
            return "the keys are not rotated"
        q, tables = argument(readers[0], 0), tensor(argument(table, 0))
        if tables.dim() != 3 or not isinstance(tables.shape[-1], int):
            return "the rotary tables are not [1, tokens, values]"
        if argument(table, 1) % 4 not in (1, 2):
            return "the rotary tables are spread over neither heads before nor heads after tokens"
        return self._spellings(anchor, q, _layouts(above, table), tables)

    def _spellings(
        self, anchor: fx.Node, q: fx.Node, layouts: Iterable[Layout], tables: Tensor
    ) -> Iterator[Spelling]:
        k, v, k_cache, v_cache, slots = (argument(anchor, place) for place in range(5))
        sample = torch.empty(1, 5, tables.shape[-1], dtype=tables.dtype)
        for layout in layouts:
            pattern, replacement = functions(layout)
            yield Spelling(
                pattern,
                replacement,
                {
                    "q": _with_heads(example(q), layout),
                    "k": _with_heads(example(k), layout),
                    "v": example(v),
                    "cos": sample,
                    "sin": sample.clone(),
                    "k_cache": example(k_cache),
                    "v_cache": example(v_cache),
                    "slots": example(slots),
                },
                ends=(q,),
                shared=("cos", "sin"),
                proof_inputs=proof_inputs(layout.table),
            )

    def check(self, match: Match) -> str | None:
        layout: Layout = match.spelling.pattern.layout  # type: ignore[attr-defined]  # set by functions()
        if layout.table == "repeated":
            return None
        for name in ("cos", "sin"):
            if not _has_equal(match.inputs[name], layout.table):
                return f"cannot see that {layout.table} of the {name} table are equal"
        return None


def _layouts(above: list[fx.Node], table: fx.Node) -> Iterator[Layout]:
    """Layouts that the nodes above the write allow, likely ones first."""
    ops = {node.target for node in above}
    is_interleaved = aten.stack.default in ops
    kind: Table = "neighbours" if is_interleaved else "halves"
    if aten.repeat_interleave.self_int in ops:
        kind = "repeated"
    is_wide = any(n.target == aten.to.dtype and n.args[1] == torch.float32 for n in above)
    width = int(tensor(argument(table, 0)).shape[-1])
    heads_dim = argument(table, 1) % 4
    upcasts: tuple[Upcast, ...] = ("first", "late") if is_wide else ("never",)
    for has_own_tables, upcast in itertools.product((False, True), upcasts):
        yield Layout(heads_dim, width, is_interleaved, kind, upcast, has_own_tables)


def _above(node: fx.Node) -> list[fx.Node]:
    """Nodes that lead to `node`, up to tables, projections, norms and graph inputs."""
    ends = {aten.unsqueeze.default, aten.linear.default, aten.view.default, aten.reshape.default, rms_norm.OP}
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        at = pending.pop()
        if at.op == "call_function" and at not in found:
            found[at] = None
            pending += [] if at.target in ends else at.all_input_nodes
    return list(found)


def _is_norm(node: fx.Node) -> bool:
    """Is `node` a norm, seen in another shape?"""
    while node.target in (aten.select.int, aten.transpose.int, operator.getitem):
        node = argument(node, 0)
    return node.target in (rms_norm.OP, add_rms_norm.OP)


def _with_heads(x_THD: Tensor, layout: Layout) -> Tensor:
    return x_THD.transpose(0, 1)[None] if layout.heads_dim == 1 else x_THD[None]


def flat(x: Tensor, heads_dim: int) -> Tensor:
    """[1, H, T, D] or [1, T, H, D] -> [T, H, D]."""
    return x.transpose(1, 2)[0] if heads_dim == 1 else x[0]


@functools.cache
def functions(layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement of a layout; the same objects each time, so that they are traced once."""

    def tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = cos.unsqueeze(layout.heads_dim), sin.unsqueeze(layout.heads_dim)
        if layout.table == "repeated":
            half = layout.rotated // 2
            return both[0][..., :half].repeat_interleave(2, -1), both[1][..., :half].repeat_interleave(2, -1)
        return both

    def turned(x: Tensor) -> Tensor:
        if layout.is_interleaved:
            return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        half = layout.rotated // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float() if layout.upcast == "first" else x
        x_rot, x_pass = wide[..., : layout.rotated], x[..., layout.rotated :]
        if layout.upcast == "late":
            out = x_rot.float() * cos + turned(x_rot).float() * sin
        else:
            out = x_rot * cos + turned(x_rot) * sin
        return flat(torch.cat((out.to(x.dtype), x_pass), dim=-1), layout.heads_dim)

    def pattern(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        for_q = tables(cos, sin)
        for_k = tables(cos, sin) if layout.has_own_tables else for_q
        kv_write.OP(rotated(k, *for_k), v, k_cache, v_cache, slots)
        return rotated(q, *for_q)

    def replacement(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        cos, sin = cos[0], sin[0]
        if layout.table == "neighbours":  # the op wants each number once in the first half
            cos, sin = (torch.cat((t[:, ::2], t[:, ::2]), -1) for t in (cos, sin))
        q, k = flat(q, layout.heads_dim), flat(k, layout.heads_dim)
        return rope_kv_write.OP(
            q, k, v, cos, sin, k_cache, v_cache, slots, None, None, 0.0, 0.0, False, layout.is_interleaved
        )

    pattern.layout = layout  # type: ignore[attr-defined]  # for check()
    return pattern, replacement


def proof_inputs(table: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Tables with equal halves or neighbours; slots that differ, one of them negative (writes nothing)."""

    def make_table(x: Tensor) -> Tensor:
        half = x[..., : x.shape[-1] // 2]
        return half.repeat_interleave(2, -1) if table == "neighbours" else torch.cat((half, half), -1)

    def make_slots(slots: Tensor) -> Tensor:
        distinct = torch.arange(slots.numel(), dtype=slots.dtype).flip(0)
        distinct[:1] = -1
        return distinct

    return {"cos": make_table, "sin": make_table, "slots": make_slots}


def _has_equal(table: fx.Node, parts: str) -> bool:
    """Do the halves (or neighbours) of a table come from one tensor, with elementwise steps in between?"""
    steps = {aten.cos.default, aten.sin.default, aten.to.dtype, aten.mul.Tensor, aten.clone.default}
    at = table
    while at.target in steps:
        factor = argument(at, 1)
        if at.target == aten.mul.Tensor and is_tensor(factor) and tensor(factor).dim():
            return False
        at = argument(at, 0)
    ends = (-1, tensor(at).dim() - 1)
    if parts == "halves":
        pieces = argument(at, 0) if at.target == aten.cat.default else ()
        return list(pieces) == list(pieces[:1]) * 2 and argument(at, 1, 0) in ends
    is_repeat = at.target == aten.repeat_interleave.self_int
    return is_repeat and argument(at, 1) == 2 and argument(at, 2) in ends
