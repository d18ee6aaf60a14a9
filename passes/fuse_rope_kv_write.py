"""Rotary embedding of q and k, then kv_write  ->  ostinato::rope_kv_write.  Numerics: close (rounds once).

Rotated pairs are halves of the head (llama) or neighbours (glm, cohere); the whole head or its first part rotates;
heads stand before tokens or after them; tables may be float32 (olmo2) and the sum may be taken in float32 (cohere,
ernie). The tables must be what the op reads: both halves equal, or neighbours equal, as seen from how they were made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from ostinato.ops import kv_write, paged_attention, rms_norm, rope_kv_write
from ostinato.passes.fusion import FusionPass, Match, Spelling, example
from ostinato.passes.values import tensor

aten = torch.ops.aten


class Layout(NamedTuple):
    """How a model spells the rotation."""

    heads_dim: int  # where the heads stand: 1 in [1, H, T, D], 2 in [1, T, H, D]
    rotated: int  # first values of a head that rotate
    is_interleaved: bool
    table: Literal[
        "halves", "neighbours", "repeated"
    ]  # equal entries of a table; repeated: its first half, in the graph
    upcast: Literal["never", "first", "late"] = "never"  # x in float32; late: after its halves changed places
    has_own_tables: bool = False  # q and k unsqueeze the tables each for themselves


class FuseRopeKVWrite(FusionPass):
    name = "rope_kv_write"
    numerics = "close"
    anchors = (kv_write.OP,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str:
        k_cache = anchor.args[2]
        readers = [u for u in k_cache.users if u.target == paged_attention.OP and anchor < u]  # type: ignore[union-attr]
        if not readers:
            return "no attention reads the written keys"
        above = _above(anchor.args[0])  # type: ignore[arg-type]  # a node
        table = next((node for node in above if node.target == aten.unsqueeze.default), None)
        if table is None:
            return "the keys are not rotated"
        q, tables = readers[0].args[0], tensor(table.args[0])  # type: ignore[arg-type]  # nodes
        if tables.dim() != 3 or not isinstance(tables.shape[-1], int):
            return "the rotary tables are not [1, tokens, values]"
        return self._spellings(anchor, q, _layouts(above, table), tables)  # type: ignore[arg-type]

    def _spellings(
        self, anchor: fx.Node, q: fx.Node, layouts: Iterable[Layout], tables: Tensor
    ) -> Iterator[Spelling]:
        k, v, k_cache, v_cache, slots = anchor.args
        sample = torch.empty(1, 5, tables.shape[-1], dtype=tables.dtype)
        for layout in layouts:
            pattern, replacement = functions(layout)
            yield Spelling(
                pattern,
                replacement,
                {
                    "q": _with_heads(example(q), layout),
                    "k": _with_heads(example(k), layout),  # type: ignore[arg-type]  # a node
                    "v": example(v),  # type: ignore[arg-type]
                    "cos": sample,
                    "sin": sample.clone(),
                    "k_cache": example(k_cache),  # type: ignore[arg-type]
                    "v_cache": example(v_cache),  # type: ignore[arg-type]
                    "slots": example(slots),  # type: ignore[arg-type]
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
    kind: Literal["halves", "neighbours", "repeated"] = "neighbours" if is_interleaved else "halves"
    if aten.repeat_interleave.self_int in ops:
        kind = "repeated"
    is_wide = any(n.target == aten.to.dtype and n.args[1] == torch.float32 for n in above)
    width = int(tensor(table.args[0]).shape[-1])  # type: ignore[arg-type]  # a node
    heads_dim = int(table.args[1]) % 4  # type: ignore[arg-type]  # a number
    for has_own_tables in (False, True):
        for upcast in ("first", "late") if is_wide else ("never",):
            yield Layout(heads_dim, width, is_interleaved, kind, upcast, has_own_tables)  # type: ignore[arg-type]


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
            return tuple(t[..., : layout.rotated // 2].repeat_interleave(2, dim=-1) for t in both)  # type: ignore[return-value]
        return both

    def turned(x: Tensor) -> Tensor:
        if layout.is_interleaved:
            return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        half = layout.rotated // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float() if layout.upcast == "first" else x
        x_rot, x_pass = wide[..., : layout.rotated], wide[..., layout.rotated :]
        if layout.upcast == "late":
            out = x_rot.float() * cos + turned(x_rot).float() * sin
        else:
            out = x_rot * cos + turned(x_rot) * sin
        return flat(torch.cat((out.to(x.dtype), x_pass), dim=-1), layout.heads_dim)

    def pattern(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
                slots: Tensor) -> Tensor:  # fmt: skip
        for_q = tables(cos, sin)
        for_k = tables(cos, sin) if layout.has_own_tables else for_q
        kv_write.OP(rotated(k, *for_k), v, k_cache, v_cache, slots)
        return rotated(q, *for_q)

    def replacement(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
                    slots: Tensor) -> Tensor:  # fmt: skip
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
    """Do the halves (or neighbours) of a table come from one tensor, with only elementwise steps in between?"""
    steps = {aten.cos.default, aten.sin.default, aten.to.dtype, aten.mul.Tensor, aten.clone.default}
    at = table
    while at.target in steps and isinstance(at.args[0], fx.Node):
        if (
            at.target == aten.mul.Tensor
            and isinstance(at.args[1], fx.Node)
            and tensor(at.args[1]).numel() != 1
        ):
            return False
        at = at.args[0]
    last = tensor(at).dim() - 1
    if parts == "halves":
        pieces = at.args[0] if at.target == aten.cat.default else ()
        dim = at.args[1] if len(at.args) > 1 else 0
        return len(pieces) == 2 and pieces[0] is pieces[1] and dim in (-1, last)  # type: ignore[arg-type, index]
    if at.target == aten.repeat_interleave.self_int:
        return at.args[1] == 2 and len(at.args) > 2 and at.args[2] in (-1, last)
    return False
