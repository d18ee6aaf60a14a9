"""Compiling for a GPU: two programs, and every kernel variant that any step of them can need.

Linear layers that nobody has measured on this GPU are measured first (`layer_tuning`), which decides what is
launched. Variants are found by doing: a shape of each class that a server can form runs as a server would run
it, and what it launches goes into the artifact. It runs twice: dry, to learn what must be compiled, which
several processes do at once; then in earnest, which loads and launches every kernel. In between, the ways of
attention that the model asked for race (`attention_tuning`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import fx

from ostinato.errors import CompileError
from ostinato.graph.capture import MAX_STEP_TOKENS
from ostinato.graph.facts import ModelFacts
from ostinato.ops import attention_choice, tuning
from ostinato.ops.kernel_store import STORE, capability
from ostinato.ops.skinny_ways import most_tokens
from ostinato.passes import pipeline
from ostinato.passes.base import PassReport
from ostinato.runtime.artifact import PlanRecord, Target, this_target
from ostinato.runtime.artifact_names import WEIGHTS
from ostinato.runtime.compile_target import ANY, Plan
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu import attention_tuning
from ostinato.runtime.gpu.device_weights import DeviceWeights
from ostinato.runtime.gpu.gpu_model import bind_gpu, gpu_driver, launchers
from ostinato.runtime.gpu.kernel_workers import compile_all
from ostinato.runtime.gpu.layer_calls import LayerCall, layers_of, noting
from ostinato.runtime.gpu.layer_tuning import Gpu, tune_layers
from ostinato.runtime.gpu.rehearsal import rehearse, rehearsing_backend
from ostinato.runtime.program import Bound
from ostinato.runtime.runner import StepShape

log = logging.getLogger(__name__)

DECODE = "decode.json"


class GpuTarget:
    """See `CompileTarget`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self.device = folder, device
        self._weights: DeviceWeights | None = None
        self._run: Bound | None = None
        self._attention = attention_choice.Asked()

    def plans(self, fused: fx.GraphModule, config: EngineConfig, reports: Sequence[PassReport]) -> list[Plan]:
        """One for few tokens, where reading the weights decides, and one for the rest."""
        _check_kernels(fused)
        few = deepcopy(fused)
        more = pipeline.run_decode_plan(few, config.passes, reports)
        last = most_tokens(capability(self.device.index or 0))
        return [
            Plan(PlanRecord(first=1, last=last, program=DECODE), few, more),
            Plan(PlanRecord(first=last + 1, last=MAX_STEP_TOKENS, program=ANY), fused, ()),
        ]

    def make_kernels(self, plans: Sequence[PlanRecord], config: EngineConfig, facts: ModelFacts) -> float:
        """Put the weights on the device, run a shape of each class, and write what was launched."""
        began = time.perf_counter()
        tuning.write(self._folder)
        self._fill_weights()
        loaded = time.perf_counter()
        if config.graph.tune_s:
            self._tune_layers(plans, config, facts)
        tuned = time.perf_counter()
        run = self.load(plans)
        backend = rehearsing_backend(run, facts, config, self.device)
        try:
            with STORE.recording(is_dry=True) as wanted:
                rehearse(backend)
            missing = STORE.missing(wanted.variants.values())
            for binary, cubin in compile_all(missing, capability(self.device.index)):
                STORE.add(binary, cubin)
            compiled = time.perf_counter()
            if config.graph.tune_s and self._attention.attentions:
                self._tune_attention(facts)
            with STORE.recording() as launched:
                rehearse(backend)
        finally:
            backend.shut()
        if STORE.write(self._folder, launched.variants) == 0:
            raise CompileError("not one GPU kernel was launched; the model's graph has none of our operators")
        log.info(
            "%d kernel variants; weights on the GPU %.1f s, %d compiled in %.1f s, run in %.1f s",
            len(launched.variants),
            loaded - began,
            len(missing),
            compiled - tuned,
            time.perf_counter() - compiled,
        )
        return time.perf_counter() - began

    def _tune_attention(self, facts: ModelFacts) -> None:
        """Measure the attention that a dry run asked for; the programs use the choices from here on.

        For the model's own window: a server may set a shorter one, and the key of a compile has none.
        """
        measured = attention_tuning.measure(self._attention, window=facts.max_model_len, device=self.device)
        attention_choice.write(self._folder, measured)

    def _tune_layers(self, plans: Sequence[PlanRecord], config: EngineConfig, facts: ModelFacts) -> None:
        """Measure the linear layers that the GPU's table lacks, and add them to the artifact's."""
        choices = tuning.read(self._folder)
        calls: list[LayerCall] = []
        ops = launchers(choices) | noting(calls, choices)
        run = bind_gpu(self._folder, plans, self._fill_weights(), ops)
        backend = rehearsing_backend(run, facts, config, self.device)
        try:
            with STORE.recording(is_dry=True):
                backend.rehearse(StepShape(2, 2, 2))
        finally:
            backend.shut()
        layers, gpu = layers_of(calls), Gpu.of(self.device)
        tuned = tune_layers(layers, choices, gpu, config.graph.tune_s)
        if not tuned.num_candidates:
            return
        tuning.add(self._folder / tuning.FILE, tuned.rows, measured=tuned.about)
        log.info(
            "%d shapes of linear layers measured, %d go another way than the default; %d candidates, "
            "%d variants compiled in %.1f s; %.1f s in all",
            len(tuned.rows),
            tuned.about["not_default"],
            tuned.num_candidates,
            tuned.num_variants,
            tuned.compile_s,
            tuned.seconds,
        )

    def _fill_weights(self) -> DeviceWeights:
        """The weights on the device, which are read once."""
        if self._weights is None:
            self._weights = DeviceWeights(self._folder / WEIGHTS, gpu_driver(self.device))
            self._weights.fill()
        return self._weights

    def load(self, plans: Sequence[PlanRecord]) -> Bound:
        """The programs over the weights on the device, bound once."""
        if self._run is None:
            ops = launchers(tuning.read(self._folder), self._attention)
            self._run = bind_gpu(self._folder, plans, self._fill_weights(), ops)
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


def _check_kernels(graph_module: fx.GraphModule) -> None:
    """Raise CompileError if an operator of ours has no GPU kernel."""
    there = launchers({})
    targets = {node.target for node in graph_module.graph.nodes if node.op == "call_function"}
    ours = {
        t._schema.name for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace == "ostinato"
    }
    if missing := sorted(ours - there.keys()):
        names = ", ".join(name.removeprefix("ostinato::") for name in missing)
        raise CompileError(
            f"graph.target=cuda: the model needs {names}, which has no GPU kernel yet; compile it with "
            "--target cpu, or serve it with --graph.target cpu"
        )
