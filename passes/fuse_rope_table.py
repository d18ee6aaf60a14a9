"""cos and sin of position * inv_freq, each frequency in both halves  ->  ostinato::rope_table.

Numerics: close (one kernel, not eight; the same float32 angles).
The frequencies must be a weight of the graph: models that compute them from the sequence length (dynamic,
longrope) keep their nodes, and so do tables that repeat each frequency side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ostinato.ops import rope_table
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Match, Spelling
from ostinato.passes.trace import Example
from ostinato.passes.values import argument, is_tensor, tensor

aten = torch.ops.aten

SCALING = 1.06789  # any number that stands in no other place of the patterns


class FuseRopeTable(FusionPass):
    name = "rope_table"
    numerics = "close"
    anchors = (aten.cos.default,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str:
        angles = argument(anchor, 0)
        if angles.target == aten.repeat_interleave.self_int:
            return "each frequency stands twice side by side, not in both halves"
        if angles.target != aten.cat.default:
            return "the cosine is not taken of angles in both halves of a row"
        is_scaled, dtype = _steps_after(anchor)
        examples: dict[str, Example] = {
            "positions": torch.zeros(5, dtype=torch.int64),
            "inv_freq": torch.empty(3),
        }
        if is_scaled:
            examples["scaling"] = SCALING
        return [
            Spelling(
                *functions(dtype, is_outer),
                examples,
                shared=("positions",),
                proof_inputs={"positions": far_apart, "inv_freq": torch.abs},
            )
            for is_outer in (False, True)
        ]

    def check(self, match: Match) -> str | None:
        if match.inputs["inv_freq"].op != "placeholder":
            return "the frequencies are computed in the graph"
        return None


def _steps_after(cos: fx.Node) -> tuple[bool, torch.dtype]:
    """Is the cosine multiplied by a number, and which type does it end in?"""
    at, is_scaled = cos, False
    for user in at.users:
        if user.target == aten.mul.Tensor and not is_tensor(argument(user, 1)):
            at, is_scaled = user, True
            break
    casts = [user for user in at.users if user.target == aten.to.dtype]
    return is_scaled, tensor(casts[0] if casts else at).dtype


@functools.cache
def functions(dtype: torch.dtype, is_outer: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pattern and replacement; `is_outer`: the angles are written as a matrix product."""

    def pattern(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        ids = positions[None]
        if is_outer:
            angles = (inv_freq[None, :, None] @ ids[:, None, :].float()).transpose(1, 2)
        else:
            angles = ids[..., None].float() * inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)

    def replacement(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        cos, sin = rope_table.OP(positions, inv_freq, scaling, dtype)
        return cos[None], sin[None]

    return pattern, replacement


def far_apart(positions: Tensor) -> Tensor:
    """Distinct positions up to a hundred thousand."""
    return torch.arange(positions.numel()).flip(0) * (99_991 // max(positions.numel(), 1))
