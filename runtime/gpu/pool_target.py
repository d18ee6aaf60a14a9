"""A model that embeds or scores on a GPU: one program, whose operators of ours are torch's own kernels.

No Triton kernel runs here: attention is one call of torch's SDPA for each sequence, and every other operator
of ours its reference. That is correct and not tuned; nothing has to be compiled, so the artifact holds no
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx

from ostinato.graph.capture import MAX_STEP_TOKENS
from ostinato.graph.facts import ModelFacts
from ostinato.passes.base import PassReport
from ostinato.runtime.artifact import PlanRecord, Target, this_target
from ostinato.runtime.artifact_names import WEIGHTS
from ostinato.runtime.compile_target import ANY, Plan
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu.device_weights import DeviceWeights
from ostinato.runtime.gpu.gpu_model import bind_pooling, gpu_driver
from ostinato.runtime.program import Bound


class GpuPoolTarget:
    """See `CompileTarget`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self.device = folder, device
        self._weights: DeviceWeights | None = None
        self._run: Bound | None = None

    def plans(self, fused: fx.GraphModule, config: EngineConfig, reports: Sequence[PassReport]) -> list[Plan]:
        """One for all."""
        return [Plan(PlanRecord(first=1, last=MAX_STEP_TOKENS, program=ANY), fused, ())]

    def make_kernels(self, plans: Sequence[PlanRecord], config: EngineConfig, facts: ModelFacts) -> float:
        """There are none."""
        return 0.0

    def load(self, plans: Sequence[PlanRecord]) -> Bound:
        """The program over the weights on the device, which are read once."""
        if self._run is None:
            self._weights = DeviceWeights(self._folder / WEIGHTS, gpu_driver(self.device))
            self._weights.fill()
            self._run = bind_pooling(self._folder, plans, self._weights)
        return self._run

    def described(self) -> tuple[Target, str]:
        """This kind of GPU, of any size; nothing was compiled."""
        here = this_target(self.device)
        return here.model_copy(update={"features": here.features[:1]}), "none"

    def close(self) -> None:
        """Free the weights on the device."""
        self._run = None
        if self._weights is not None:
            self._weights.close()
            torch.cuda.empty_cache()
