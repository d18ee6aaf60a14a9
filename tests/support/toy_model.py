"""A two-layer attention model with random weights: fast, and any KV mistake changes its tokens.

It is called as a loaded artifact is, so the engine cannot tell.  `POISON` and `CRASH` are prompt tokens that
make a row NaN and the whole step raise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.errors import ArtifactError
from ostinato.graph.facts import AttentionFact, KVLayer, ModelFacts
from ostinato.ops import kv_write, paged_attention
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.sleeping_weights import FixedWeights

VOCAB, WIDTH, HEADS, KV_HEADS, SIZE, LAYERS = 512, 32, 4, 2, 8, 2
SCALE = 1.0  # large scores: attention is peaked, so one wrong key shows
EOS = 1
POISON, CRASH = VOCAB - 2, VOCAB - 1

FACTS = ModelFacts(
    architecture="ToyForCausalLM",
    model_type="toy",
    dtype="float32",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    max_model_len=512,
    kv_layers=tuple(KVLayer(kv_heads=KV_HEADS, k_size=SIZE, v_size=SIZE) for _ in range(LAYERS)),
    attention=tuple(
        AttentionFact(layer=i, kv_layer=i, heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, scale=SCALE)
        for i in range(LAYERS)
    ),
    eos_token_ids=(EOS,),
)


class ToyModel:
    """`model(inputs, kv) -> logits [R, V]`, like `LoadedModel`. `step_s` makes each step that slow."""

    def __init__(self, folder: Path = Path("toy"), *, seed: int = 0, step_s: float = 0.0) -> None:
        self.facts = FACTS
        self.weights = FixedWeights()
        self.device = torch.device("cpu")
        self.folder = folder
        self.step_s = step_s
        self.steps = 0
        draw = torch.Generator().manual_seed(seed)
        self._embed = torch.randn(VOCAB, WIDTH, generator=draw)
        self._embed[POISON] = float("nan")
        self._head = torch.randn(VOCAB, WIDTH, generator=draw)
        self._head[[EOS, POISON, CRASH]] = 0.0  # logit 0, never the greatest: only a request can bring them
        sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
        self._layers = [
            {name: torch.randn(size, WIDTH, generator=draw) / WIDTH**0.5 for name, size in sizes.items()}
            | {"o": torch.randn(WIDTH, HEADS * SIZE, generator=draw) / WIDTH**0.5}
            for _ in range(LAYERS)
        ]

    def name_calls(self, named: bool) -> None:
        """All it does are torch's operators."""

    def start_team(self) -> None:
        """It has no threads of its own."""

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor]) -> Tensor:
        self.steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        if bool((inputs.token_ids == CRASH).any()):
            raise RuntimeError("toy model crashed")
        x = self._embed[inputs.token_ids] + _wave(inputs.positions)
        for at, layer in enumerate(self._layers):
            q, k, v = self._qkv(x, layer)
            k_plane, v_plane = kv[2 * at], kv[2 * at + 1]
            kv_write.OP(k, v, k_plane, v_plane, inputs.slot_mapping)
            mixed = paged_attention.OP(
                q,
                k_plane,
                v_plane,
                inputs.block_tables,
                inputs.seq_lens,
                inputs.query_start,
                SCALE,
                0,
                0.0,
            )
            x = x + mixed.flatten(1) @ layer["o"].T
        return _norm(x[inputs.logit_rows]) @ self._head.T

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The truth: greedy tokens by recomputing the whole sequence densely, no cache, no blocks."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.dense_logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def dense_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [T, V] of one sequence, by plain attention."""
        x = self._embed[torch.tensor(ids)] + _wave(torch.arange(len(ids)))
        for layer in self._layers:
            q, k, v = (part.transpose(0, 1) for part in self._qkv(x, layer))
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
            x = x + mixed.transpose(0, 1).flatten(1) @ layer["o"].T
        return _norm(x) @ self._head.T

    def _qkv(self, x: Tensor, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = _norm(x)
        q, k, v = ((x @ layer[name].T).view(len(x), -1, SIZE) for name in "qkv")
        return q, k, v


def load_toy(path: Path, config: EngineConfig) -> ToyModel:
    """Stands in for `load_artifact`; the folder's name says what goes wrong, if anything."""
    match path.name:
        case "damaged":
            raise ArtifactError("damaged: a flipped byte")
        case "raises":
            raise ZeroDivisionError("not one of ours")
        case "exits":
            os._exit(7)
    return ToyModel(path, step_s=0.02 if path.name == "slow" else 0.0)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _wave(positions: Tensor) -> Tensor:
    """Position embedding [T, WIDTH]: makes the order of tokens matter."""
    angle = positions[:, None] / 50.0 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    return torch.cat([angle.sin(), angle.cos()], -1)
