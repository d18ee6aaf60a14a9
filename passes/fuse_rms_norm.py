"""An RMSNorm written out  ->  ostinato::rms_norm.  Numerics: close (another kernel, same rounding points).

Spellings: llama (round, then times weight), gemma (times 1 + weight in float32, then round), olmo2 (times
weight in float32, then round), each with rsqrt(...) or pow(..., -0.5), and aten.rms_norm. A norm without a
weight stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ostinato.ops import rms_norm
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Match, Spelling, example
from ostinato.passes.trace import Example
from ostinato.passes.values import argument, is_tensor, tensor

aten = torch.ops.aten

EPS, OFFSET = 0.01234, 1.06789  # any numbers that stand in no other place of the patterns


class FuseRMSNorm(FusionPass):
    name = "rms_norm"
    numerics = "close"
    anchors = (aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.rms_norm.default)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str | None:
        if anchor.target == aten.pow.Tensor_Scalar and anchor.args[1] != -0.5:
            return None
        if anchor.target == aten.rms_norm.default:
            return _library_call(anchor)
        source = _norm_input(anchor)
        if source is None:
            return "the root is not taken of a mean of squares plus a number"
        if source.target == aten.sub.Tensor:
            return "the mean is taken off first: a LayerNorm"
        if not _is_weighed(anchor):
            return "the norm has no weight"
        return _written_out(tensor(source), uses_pow=anchor.target == aten.pow.Tensor_Scalar)

    def check(self, match: Match) -> str | None:
        x, weight = match.value("x"), match.value("weight")
        if weight.shape != x.shape[-1:]:
            return "the weight does not have the size of the last dimension"
        return None


def _norm_input(anchor: fx.Node) -> fx.Node | None:
    """What the squares are taken of, before its cast to float32."""
    at = anchor
    for target in (aten.add.Tensor, aten.mean.dim, aten.pow.Tensor_Scalar):
        step = at.args[0]
        if not isinstance(step, fx.Node) or step.target != target:
            return None
        at = step
    source = at.args[0]
    if isinstance(source, fx.Node) and source.target == aten.to.dtype:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and is_tensor(source) else None


def _is_weighed(anchor: fx.Node) -> bool:
    """Is x times the root, perhaps cast, multiplied once more?"""
    xhats = [user for user in anchor.users if user.target == aten.mul.Tensor]
    casts = [user for xhat in xhats for user in xhat.users if user.target == aten.to.dtype]
    return any(user.target == aten.mul.Tensor for xhat in (*xhats, *casts) for user in xhat.users)


def _written_out(x: Tensor, *, uses_pow: bool) -> Iterator[Spelling]:
    sample = torch.empty([2] * x.dim(), dtype=x.dtype)
    for weight_type in dict.fromkeys((x.dtype, torch.float32)):
        inputs: dict[str, Example] = {"x": sample, "weight": torch.empty(2, dtype=weight_type), "eps": EPS}
        for pattern, replacement, constants in SPELLINGS[uses_pow]:
            yield Spelling(pattern, replacement, inputs | constants)


def _library_call(anchor: fx.Node) -> Iterable[Spelling] | str:
    x, weight, eps = (argument(anchor, place) for place in (0, 2, 3))
    if weight is None or eps is None:
        return "rms_norm without a weight or without eps"
    examples: dict[str, Example] = {"x": example(x), "weight": example(weight), "eps": EPS}
    return [Spelling(library, fused_olmo2, examples)]


def _xhat(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _xhat_pow(x: Tensor, eps: float) -> Tensor:
    return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + eps, -0.5)


Function = Callable[..., Tensor]


def _spellings(xhat: Function) -> list[tuple[Function, Function, dict[str, Example]]]:
    def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * xhat(x.float(), eps).to(x.dtype)

    def gemma(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        return (xhat(x.float(), eps) * (weight.float() + offset)).to(x.dtype)

    def olmo2(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (weight * xhat(x.float(), eps)).to(x.dtype)

    def gemma4(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (xhat(x.float(), eps) * weight.float()).to(x.dtype)

    return [
        # first: in float32 the others would take 1 + weight for the weight
        (gemma, fused_gemma, {"offset": OFFSET}),
        (llama, fused_llama, {}),
        (olmo2, fused_olmo2, {}),
        (gemma4, fused_olmo2, {}),
    ]


def fused_llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm.OP(x, weight, eps, 0.0, True)


def fused_gemma(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return rms_norm.OP(x, weight, eps, offset, False)


def fused_olmo2(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm.OP(x, weight, eps, 0.0, False)


def library(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, list(weight.shape), weight, eps)


SPELLINGS = {False: _spellings(_xhat), True: _spellings(_xhat_pow)}
