"""A model that embeds or scores without a network: its numbers are simple sums over tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ostinato.graph.facts import ModelFacts, PoolingFacts
from ostinato.ops.step_inputs import PoolInputs
from ostinato.runtime.sleeping_weights import FixedWeights, Weights
from tests.support.tiny_encoders import VOCAB

SIZE = 6
EMBEDS = PoolingFacts(task="embed", pooling="mean", size=SIZE, normalize=True, causal=False, token_types=2)
SCORES = PoolingFacts(task="score", pooling="cls", size=1, sigmoid=True, causal=False, token_types=2)


def numbers(ids: list[int], types: list[int] | None = None) -> Tensor:
    """What the model gives for one sequence, [SIZE]: powers of tokens, weighted by their type."""
    tokens = torch.tensor(ids, dtype=torch.float32)[:, None] / VOCAB
    kinds = torch.zeros(len(ids)) if types is None else torch.tensor(types, dtype=torch.float32)
    return ((tokens ** torch.arange(1, SIZE + 1)) * (1 + kinds[:, None])).mean(0)


@dataclass
class ToyPoolModel:
    """`gate`: a step waits for it. A step with token `broken` raises."""

    pooling: PoolingFacts = EMBEDS
    window: int = 16
    gate: threading.Event | None = None
    broken: int = -1
    steps: list[list[int]] = field(default_factory=list)  # lengths of the sequences of each step
    device = torch.device("cpu")
    folder = Path("toy")
    weights: Weights = field(default_factory=FixedWeights)

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            architecture="Toy", model_type="toy", dtype="float32", vocab_size=VOCAB, hidden_size=SIZE,
            max_model_len=self.window, kv_layers=(), attention=(), pooling=self.pooling,
        )  # fmt: skip

    def start_team(self) -> None:
        """It computes alone."""

    def name_calls(self, named: bool) -> None:
        """It has none."""

    def __call__(self, inputs: PoolInputs, kv: tuple[()]) -> Tensor:
        starts = inputs.query_start.tolist()
        self.steps.append([b - a for a, b in pairwise(starts)])
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.broken in inputs.token_ids.tolist():
            raise RuntimeError("a broken token")
        rows = [
            numbers(inputs.token_ids[a:b].tolist(), inputs.token_types[a:b].tolist())
            for a, b in pairwise(starts)
        ]
        return torch.stack(rows)[:, : self.pooling.size]
