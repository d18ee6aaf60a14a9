"""A GPU back end whose device does nothing: the host's share of a step, measured where there is no GPU.

Scheduler, step buffers, staging of the sampler, results and events are the engine's own; a launch copies to
CPU memory, a replay writes one token id for every row, and nothing is ever waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from ostinato.graph.facts import AttentionFact, KVLayer, ModelFacts
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.config import CpuConfig, EngineConfig, KVConfig, SchedulerConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.gpu.step_graphs import Replay
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.runner import StepShape
from ostinato.runtime.sleeping_weights import FixedWeights
from ostinato.runtime.step_backend import StepBackend

TOKEN = 70  # what every row samples; a letter in the toy tokenizer
FACTS = ModelFacts(
    architecture="NothingForCausalLM",
    model_type="nothing",
    dtype="bfloat16",
    vocab_size=400,
    hidden_size=64,
    max_model_len=4096,
    kv_layers=(KVLayer(kv_heads=1, k_size=1, v_size=1),),
    attention=(AttentionFact(layer=0, kv_layer=0, heads=1, kv_heads=1, head_size=1, scale=1.0),),
    eos_token_ids=(1,),
)


class NoModel:
    """Stands for an artifact; it is called for steps that are not replayed."""

    facts = FACTS
    folder = Path("nothing")
    device = torch.device("cpu")
    weights = FixedWeights()

    def name_calls(self, named: bool) -> None:
        """All it does are torch's operators."""

    def start_team(self) -> None:
        """It has no threads."""

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor], /) -> Tensor:
        """Logits of equal tokens."""
        return torch.zeros(len(inputs.logit_rows), FACTS.vocab_size, dtype=torch.bfloat16)


class _NoEvent:
    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class NoGpuBackend(GpuBackend):
    """`GpuBackend` with CPU memory; every shape counts as captured."""

    def __init__(self, model: NoModel, planes: Sequence[Tensor], config: EngineConfig, window: int) -> None:
        zeros = torch.zeros

        def unpinned(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            return zeros(*size, **kwargs)

        cuda = SimpleNamespace(set_stream=lambda _: None, Event=_NoEvent, graph_pool_handle=lambda: None)
        with patch.object(torch, "zeros", unpinned), patch.multiple(torch.cuda, **vars(cuda)):
            stream = cast("torch.cuda.Stream", None)
            super().__init__(model, planes, config, window=window, stream=stream)
        graphs = cast("Any", self._graphs)
        for shape in [*graphs._decode, *graphs._mixed]:
            graphs._captured[shape] = self._replay(shape)
        graphs._waiting.clear()

    def _replay(self, shape: StepShape) -> Replay:
        out = self._output(shape.logit_rows)
        tokens, status = out.tokens.numpy(), out.status.numpy()

        def replay() -> None:
            tokens.fill(TOKEN)
            status.fill(0)

        graph = cast("torch.cuda.CUDAGraph", SimpleNamespace(replay=replay))
        return Replay(graph, torch.zeros(shape.logit_rows, FACTS.vocab_size))

    def _compute(self, shape: StepShape) -> Tensor:
        inputs, _ = self._buffers.inputs(shape)
        return self._model(inputs, self._planes)

    def _sample(self, shape: StepShape, logits: Tensor) -> None:
        self._replay(shape).graph.replay()

    def check(self) -> None:
        """There is no device that could fail."""

    def shut(self) -> None:
        """There is no stream to wait for."""
        self._graphs.clear()
        self._planes = ()


class HostEngine(Engine):
    """The engine on the device that does nothing."""

    def _make_backend(self, model: Any, window: int, stream: torch.cuda.Stream | None) -> StepBackend:
        return NoGpuBackend(model, self._memory.planes(), self._config, window)


def config() -> EngineConfig:
    """Room for 256 sequences of 2,048 tokens; memory does not grow while it is measured."""
    return EngineConfig(
        kv=KVConfig(initial_mib=4, max_gib=4 / 1024, headroom_gib=0),
        cpu=CpuConfig(bind=False),
        scheduler=SchedulerConfig(max_step_tokens=4096),
        log_level="ERROR",
    )


def request(name: str, max_tokens: int, *, prompt: int = 64, **sampling: Any) -> GenerateRequest:
    """A prompt of so many tokens."""
    params = {"temperature": 1.0, "seed": 1, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    seed = sum(name.encode())
    ids = tuple(3 + (at * 7 + seed) % 300 for at in range(prompt))
    return GenerateRequest(request_id=name, prompt_token_ids=ids, sampling=SamplingParams(**params))
