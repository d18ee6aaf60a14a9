"""rms_norm(x + residual)  ->  ostinato::add_rms_norm, which returns the norm and the sum.

Numerics: close (one kernel instead of two, same rounding points). Runs after fuse_rms_norm, so every spelling
of the norm is covered. A scaled branch (granite) stays outside: the sum is residual + branch * factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx

from ostinato.ops import add_rms_norm, rms_norm
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Match, Spelling
from ostinato.passes.trace import Example
from ostinato.passes.values import is_tensor, same_shape, tensor

aten = torch.ops.aten

EPS, OFFSET = 0.01234, 1.06789  # any numbers that stand in no other place of the patterns


class FuseAddRMSNorm(FusionPass):
    name = "add_rms_norm"
    numerics = "close"
    needs = ("rms_norm",)
    anchors = (rms_norm.OP,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | None:
        total, weight, _, _, round_first = cast("tuple[Any, ...]", anchor.args)
        if total.target != aten.add.Tensor or not is_tensor(total.args[1]):
            return None
        sample = torch.empty([2] * tensor(total).dim(), dtype=tensor(total).dtype)
        examples: dict[str, Example] = {
            "x": sample,
            "residual": sample.clone(),
            "weight": torch.empty(2, dtype=tensor(weight).dtype),
            "eps": EPS,
            "offset": OFFSET,
        }
        return [Spelling(*SPELLINGS[bool(round_first)], examples)]

    def check(self, match: Match) -> str | None:
        if same_shape(match.value("x"), match.value("residual")):
            return None
        return "the two parts of the sum differ in shape"


def round_first(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm.OP(total, weight, eps, offset, True), total


def round_last(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm.OP(total, weight, eps, offset, False), total


def fused_round_first(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return add_rms_norm.OP(x, residual, weight, eps, offset, True)


def fused_round_last(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    return add_rms_norm.OP(x, residual, weight, eps, offset, False)


SPELLINGS = {True: (round_first, fused_round_first), False: (round_last, fused_round_last)}
