"""Captured graphs of tiny models, and a reference run of transformers itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.graph.build import BuiltModel, build_model
from ostinato.graph.capture import CapturedGraph, capture
from ostinato.graph.expectations import expected_matches
from ostinato.graph.hooks import CaptureHooks
from ostinato.ops.step_inputs import StepInputs

BLOCK = 4


def capture_tiny(config: Any, dtype: torch.dtype = torch.float32) -> tuple[BuiltModel, CapturedGraph]:
    """Build and trace the model that a transformers config describes."""
    hooks = CaptureHooks()
    built = build_model(config, dtype, hooks)
    facts = {
        "architecture": type(built.model).__name__,
        "model_type": config.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "max_model_len": config.max_position_embeddings,
    }
    captured = capture(built, hooks, facts, block_tokens=BLOCK)
    expected = expected_matches(built.model, captured.graph_module.graph)
    return built, captured._replace(facts=captured.facts.model_copy(update={"expected_matches": expected}))


def weight_values(model: PreTrainedModel, captured: CapturedGraph) -> dict[str, Tensor]:
    """Values of a graph's plain weights by parameter name, from a transformers model."""
    return {**dict(model.state_dict()), **captured.constants}


def kv_planes(captured: CapturedGraph, blocks: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Planes filled with NaN, so that a read of an unwritten slot shows."""
    return [
        torch.full((blocks, BLOCK, layer.kv_heads, size), float("nan"), dtype=dtype)
        for layer in captured.facts.kv_layers
        for size in (layer.k_size, layer.v_size)
    ]


class Sequences:
    """Feeds several token sequences in arbitrary chunks; keeps positions, slots and block tables."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts, self.done = prompts, [0] * len(prompts)
        longest = max(len(prompt) for prompt in prompts)
        self.width = -(-longest // BLOCK)
        order = torch.randperm(len(prompts) * self.width, generator=torch.Generator().manual_seed(1)).int()
        self.tables = order.view(len(prompts), self.width)

    @property
    def num_blocks(self) -> int:
        return self.tables.numel()

    def step(self, lengths: dict[int, int]) -> StepInputs:
        """Inputs that feed `lengths[i]` more tokens of sequence i; logits of every row."""
        ids, positions, slots = [], [], []
        for i, n in lengths.items():
            at = torch.arange(self.done[i], self.done[i] + n)
            ids += self.prompts[i][self.done[i] : self.done[i] + n]
            positions.append(at)
            slots.append(self.tables[i, at // BLOCK].long() * BLOCK + at % BLOCK)
            self.done[i] += n
        rows = list(lengths)
        counts = torch.tensor([0, *lengths.values()], dtype=torch.int32)
        return StepInputs(
            token_ids=torch.tensor(ids),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            block_tables=self.tables[rows],
            seq_lens=torch.tensor([self.done[i] for i in rows], dtype=torch.int32),
            query_start=counts.cumsum(0, dtype=torch.int32),
            logit_rows=torch.arange(len(ids)),
        )
