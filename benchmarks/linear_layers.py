"""Linear layers of two models as benchmarks see them: shapes, random weights, three ways to compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops import rms_norm, silu_mul, skinny_gated, skinny_linear

EPS = 1e-5
CHAIN_BYTES = 600 << 20  # of weights under one graph of a single layer: ten times the L2 of an H200
WORST_ERROR = 1e-2  # relative, of bf16 operands against float32


class Layer(NamedTuple):
    num_rows: int  # of the weight: for a gated layer gate and up
    width: int
    is_gated: bool = False
    has_norm: bool = False
    has_residual: bool = False

    @property
    def num_out(self) -> int:
        return self.num_rows // 2 if self.is_gated else self.num_rows

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_rows * self.width

    @property
    def op(self) -> Any:
        return skinny_gated if self.is_gated else skinny_linear


class Model(NamedTuple):
    num_layers: int
    layers: dict[str, Layer]  # of one block, in their order; the last is the head of the model

    @property
    def num_bytes(self) -> int:
        *block, head = self.layers.values()
        return self.num_layers * sum(layer.num_bytes for layer in block) + head.num_bytes


def model(num_layers: int, hidden: int, feed_forward: int, qkv: int, vocabulary: int) -> Model:
    layers = {
        "qkv": Layer(qkv, hidden, has_norm=True),
        "o": Layer(hidden, hidden, has_residual=True),
        "gate_up": Layer(2 * feed_forward, hidden, is_gated=True, has_norm=True),
        "down": Layer(hidden, feed_forward, has_residual=True),
        "head": Layer(vocabulary, hidden, has_norm=True),
    }
    return Model(num_layers, layers)


MODELS = {
    "llama-8b": model(32, 4096, 14336, 6144, 128256),
    "smollm2-135m": model(30, 576, 1536, 960, 49152),
}


def ours(layer: Layer, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
    scale = norm[: layer.width] if layer.has_norm else None
    if layer.is_gated:
        return skinny_gated.launch(x, weight, scale, EPS, 0.0, True, "silu")
    added = residual if layer.has_residual else None
    return skinny_linear.launch(x, weight, None, scale, EPS, 0.0, True, added)


def parts(layer: Layer, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
    if layer.has_norm:
        x = rms_norm.OP(x, norm[: layer.width], EPS, 0.0, True)
    y = F.linear(x, weight)
    if layer.is_gated:
        return silu_mul.OP(*y.chunk(2, -1))
    return y + residual if layer.has_residual else y


class Bench:
    """Random weights on the GPU, carved out of one buffer."""

    def __init__(self, num_values: int) -> None:
        self.arena = torch.empty(num_values, dtype=torch.bfloat16, device="cuda")
        for piece in self.arena.split(1 << 28):
            piece.normal_(std=0.02)
        self.norm = torch.rand(16384, device="cuda").add_(0.5).bfloat16()

    def weights(self, layer: Layer, count: int, first: int = 0) -> list[Tensor]:
        """Weights that lie one after the other, from value `first` on."""
        size = layer.num_rows * layer.width
        some = self.arena[first : first + count * size]
        return list(some.view(count, layer.num_rows, layer.width).unbind())

    def chain(self, layer: Layer, num_tokens: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Copies of a layer for one graph, x and residual."""
        count = min(max(CHAIN_BYTES // layer.num_bytes, 2), 128)
        x, residual = (
            torch.randn(num_tokens, size, device="cuda").bfloat16() for size in (layer.width, layer.num_out)
        )
        return self.weights(layer, count), x, residual


def check(bench: Bench, layer: Layer, num_tokens: int) -> None:
    """Against the parts in float32; raises RuntimeError."""
    weights, x, residual = bench.chain(layer, num_tokens)
    given = x, weights[0], bench.norm, residual
    y = ours(layer, *given).float()
    truth = parts(layer, *(tensor.float() for tensor in given))
    error = float((y - truth).norm() / truth.norm())
    if not error < WORST_ERROR:
        raise RuntimeError(f"{layer} with {num_tokens} tokens: relative error {error:.3g}")
