"""Every kernel of a model, launched once: how `compile-model` learns which variants an artifact must hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ostinato.graph.capture import MAX_STEP_TOKENS
from ostinato.graph.facts import ModelFacts
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.config import EngineConfig, resolve
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.gpu.step_graphs import bucket_shapes
from ostinato.runtime.program import Bound
from ostinato.runtime.runner import StepShape
from ostinato.runtime.sleeping_weights import FixedWeights


def rehearse(run: Bound, facts: ModelFacts, config: EngineConfig, device: torch.device) -> None:
    """Run every shape that a server captures, and a spread of others, once: all kernels are launched."""
    config = resolve(config, device.type)
    scheduler = config.scheduler.model_copy(update={"max_step_tokens": MAX_STEP_TOKENS})
    config = config.model_copy(update={"scheduler": scheduler})
    dtype = getattr(torch, facts.dtype)
    planes = [
        torch.randn(2, config.kv.block_tokens, layer.kv_heads, size, device=device).to(dtype)
        for layer in facts.kv_layers
        for size in (layer.k_size, layer.v_size)
    ]
    window = min(facts.max_model_len, config.max_model_len or facts.max_model_len)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    model = _Rehearsed(facts, run, device)
    backend = GpuBackend(model, planes, config, window=window, stream=stream)
    try:
        most = scheduler.max_running
        shapes = set(bucket_shapes(most, MAX_STEP_TOKENS))
        shapes |= {StepShape(size, size, size) for size in range(1, most + 1)}
        shapes |= {
            StepShape(tokens, count, count)
            for tokens in (2, 3, 15, 16, 17, 33, 100, 250, 511, 1000, 2047, 3001, 5000, 8191, 8192)
            for count in (1, 2, 3, 8, 17, 32, 65, 128, most)
            if count < tokens and count <= most
        }
        for shape in sorted(shapes):
            backend.rehearse(shape)
    finally:
        backend.shut()


class _Rehearsed:
    """A program as a model."""

    folder = Path("rehearsal")
    weights = FixedWeights()

    def __init__(self, facts: ModelFacts, run: Bound, device: torch.device) -> None:
        self.facts, self._run, self.device = facts, run, device

    def start_team(self) -> None:
        """A GPU needs no compute threads."""

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor]) -> Tensor:
        return self._run(inputs, kv)
