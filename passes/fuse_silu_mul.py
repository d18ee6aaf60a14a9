"""silu(gate) * up  ->  ostinato::silu_mul, in either order.

Numerics: close (another kernel, same rounding points).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ostinato.ops import silu_mul
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Match, Spelling, example
from ostinato.passes.values import same_shape


class FuseSiluMul(FusionPass):
    name = "silu_mul"
    numerics = "close"
    anchors = (torch.ops.aten.silu.default,)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling]:
        yield Spelling(pattern, replacement, {"gate": example(anchor), "up": example(anchor)})

    def check(self, match: Match) -> str | None:
        return None if same_shape(match.value("gate"), match.value("up")) else "gate and up differ in shape"


def pattern(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def replacement(gate: Tensor, up: Tensor) -> Tensor:
    return silu_mul.OP(gate, up)
