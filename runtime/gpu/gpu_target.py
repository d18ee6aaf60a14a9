"""Compiling for a GPU: two programs, and every kernel variant that any step of them can need.

Variants are found by doing: with an open store every captured shape and a spread of uncaptured ones run once,
as a server would run them, and what they launched goes into the artifact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import fx

from ostinato.errors import CompileError
from ostinato.graph.capture import MAX_STEP_TOKENS
from ostinato.graph.facts import ModelFacts
from ostinato.ops import tuning
from ostinato.ops.gpu_kernels import STORE
from ostinato.passes import pipeline
from ostinato.passes.base import PassReport
from ostinato.runtime.artifact import WEIGHTS, PlanRecord, Target, this_target
from ostinato.runtime.compile_target import ANY, Plan
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu.device_weights import DeviceWeights
from ostinato.runtime.gpu.gpu_model import bind_gpu, gpu_driver
from ostinato.runtime.gpu.rehearsal import rehearse
from ostinato.runtime.program import Bound

DECODE = "decode.json"
DECODE_TOKENS = 16  # steps of up to so many tokens have a program of their own


class GpuTarget:
    """See `CompileTarget`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self.device = folder, device
        self._weights: DeviceWeights | None = None
        self._run: Bound | None = None

    def plans(self, fused: fx.GraphModule, config: EngineConfig, reports: Sequence[PassReport]) -> list[Plan]:
        """One for few tokens, where reading the weights decides, and one for the rest."""
        few = deepcopy(fused)
        more = pipeline.run_decode_plan(few, config.passes, reports)
        return [
            Plan(PlanRecord(first=1, last=DECODE_TOKENS, program=DECODE), few, more),
            Plan(PlanRecord(first=DECODE_TOKENS + 1, last=MAX_STEP_TOKENS, program=ANY), fused, ()),
        ]

    def make_kernels(self, plans: Sequence[PlanRecord], config: EngineConfig, facts: ModelFacts) -> float:
        """Put the weights on the device, run every shape, and write what was launched."""
        began = time.perf_counter()
        STORE.is_sealed = False
        tuning.write(self._folder)
        tuning.read(self._folder)
        STORE.clear_used()
        run = self.load(plans)
        rehearse(run, facts, config, self.device)
        if STORE.write(self._folder) == 0:
            raise CompileError("not one GPU kernel was launched; the model's graph has none of our operators")
        return time.perf_counter() - began

    def load(self, plans: Sequence[PlanRecord]) -> Bound:
        """The programs over the weights on the device, which are read once."""
        if self._run is None:
            self._weights = DeviceWeights(self._folder / WEIGHTS, gpu_driver(self.device))
            self._weights.fill()
            self._run = bind_gpu(self._folder, plans, self._weights)
        return self._run

    def described(self) -> tuple[Target, str]:
        """This GPU, and Triton, which made the kernels."""
        import triton

        return this_target(self.device), f"triton {triton.__version__}"

    def close(self) -> None:
        """Free the weights on the device."""
        self._run = None
        if self._weights is not None:
            self._weights.close()
            torch.cuda.empty_cache()
