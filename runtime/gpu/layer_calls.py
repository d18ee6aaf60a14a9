"""The skinny layers of a model as a step calls them, and what to time of each: a chain of real calls.

T tokens, N outputs, K width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.ops import tuning
from ostinato.ops.tuning import Choice, Shape
from ostinato.runtime.gpu.layer_candidates import OPS

CHAIN = 8  # times the L2 cache: bytes of weights in a chain
COLD = 2  # times the L2 cache: fewer bytes than that are found there again
LEAST, MOST = 4, 256  # calls in a chain
_PIECE_BYTES = 256 << 20  # of a weight in higher precision


class _Always(dict[Shape, Choice]):
    """A table that has one choice for every shape."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def get(self, shape: Shape, default: Any = None) -> Choice:
        return self._choice


class LayerCall(NamedTuple):
    """One call of an op in a step."""

    op: str
    weight: Tensor
    rest: tuple[Any, ...]  # what it takes behind x and the weight

    @property
    def has_residual(self) -> bool:
        return self.op == "skinny_linear" and self.rest[-1] is not None

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def form(self) -> Hashable:
        """What decides the kernels of a call, besides its shape."""
        given = (self.weight, *self.rest)
        return tuple((v.dtype, v.stride(), v.data_ptr() % 16) if isinstance(v, Tensor) else v for v in given)

    def __call__(self, x_TK: Tensor, residual_TN: Tensor, choice: Choice) -> Tensor:
        """The op by one way, on any x."""
        rest = (*self.rest[:-1], residual_TN) if self.has_residual else self.rest
        made: Tensor = OPS[self.op]._launch(x_TK, self.weight, *rest, choices=_Always(choice))
        return made


class Layer(NamedTuple):
    """All calls of a step that tables take for one."""

    op: str
    out: int
    width: int
    dtype: torch.dtype
    calls: tuple[LayerCall, ...]

    def shape(self, num_tokens: int) -> Shape:
        """Its name in a table."""
        return Shape(self.op, num_tokens, self.out, self.width, tuning.dtype_name(self.dtype))

    def __str__(self) -> str:
        return f"{self.op} {self.out} x {self.width} {tuning.dtype_name(self.dtype)}"


def noting(calls: list[LayerCall], choices: tuning.Choices) -> dict[str, Callable[..., Any]]:
    """Launchers of the skinny ops that put every call into `calls`."""

    def launcher(name: str) -> Callable[..., Tensor]:
        def launch(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            calls.append(LayerCall(name, weight, rest))
            made: Tensor = OPS[name]._launch(x, weight, *rest, choices=choices)
            return made

        return launch

    return {f"ostinato::{name}": launcher(name) for name in OPS}


def layers_of(calls: Sequence[LayerCall]) -> list[Layer]:
    """Calls by layer, that with the most bytes of weights first."""
    found: dict[tuple[str, int, int, torch.dtype], list[LayerCall]] = {}
    for call in calls:
        num_rows, width = call.weight.shape
        out = num_rows // 2 if call.op == "skinny_gated" else num_rows
        if out and width:
            found.setdefault((call.op, out, width, call.weight.dtype), []).append(call)
    layers = [Layer(*key, tuple(some)) for key, some in found.items()]
    return sorted(layers, key=lambda layer: -sum(call.num_bytes for call in layer.calls))


def chain_of(layer: Layer, l2_bytes: int, free_bytes: int) -> list[LayerCall]:
    """Calls one after the other whose weights are not in L2 when their turn comes.

    Weights of the model as far as they go, then copies of them. Raises torch.OutOfMemoryError where
    `free_bytes` are too few for those.
    """
    chain: list[LayerCall] = []
    have, wanted = 0, CHAIN * l2_bytes
    for call in layer.calls[:MOST]:
        if have < wanted or len(chain) < LEAST:
            chain.append(call)
            have += call.num_bytes
    distinct, copied = len(chain), 0
    while have < wanted and len(chain) < MOST:
        call = chain[len(chain) % distinct]
        if copied + call.num_bytes > free_bytes:
            if have < COLD * l2_bytes:
                raise torch.OutOfMemoryError(f"{free_bytes >> 20} MiB are free for copies of its weights")
            break
        chain.append(call._replace(weight=call.weight.clone()))
        copied, have = copied + call.num_bytes, have + call.num_bytes
    while len(chain) < LEAST:
        chain.append(chain[len(chain) % distinct])
    return chain


def truth(call: LayerCall, x_TK: Tensor, residual_TN: Tensor) -> Tensor:
    """The op's reference in float32, of float32 in float64; a piece of the weight at a time."""
    wide = torch.float64 if x_TK.dtype == torch.float32 else torch.float32
    num_rows, width = call.weight.shape
    outputs = residual_TN.shape[1]
    made = torch.empty(len(x_TK), outputs, dtype=wide, device=x_TK.device)
    step = max(1, _PIECE_BYTES // (wide.itemsize * width * (num_rows // outputs)))
    widened = [v.to(wide) if isinstance(v, Tensor) else v for v in call.rest]
    for first in range(0, outputs, step):
        piece = slice(first, first + step)
        rest = list(widened)
        if call.op == "skinny_linear":
            weight = call.weight[piece]
            rest[0] = None if rest[0] is None else rest[0][piece]
            rest[-1] = residual_TN[:, piece].to(wide) if call.has_residual else None
        else:
            weight = call.weight.unflatten(0, (2, outputs))[:, piece].reshape(-1, width)
        reference = getattr(OPS[call.op], f"{call.op}_reference")
        made[:, piece] = reference(x_TK.to(wide), weight.to(wide), *rest)
    return made


def error_of(y_TN: Tensor, truth_TN: Tensor) -> float:
    """Of all outputs together, as a share; NaN or infinite where an output is."""
    wide = truth_TN.dtype
    return float((y_TN.to(wide) - truth_TN).norm() / truth_TN.norm())
