"""A model in GPU memory: its programs over weights on the device and the launchers of our own ops."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import ArtifactError
from ostinato.ops import all_ops, attention_choice, tuning, varlen_attention
from ostinato.ops.kernel_store import STORE
from ostinato.ops.step_inputs import PoolInputs, StepInputs
from ostinato.runtime.artifact import Manifest, PlanRecord, read_program
from ostinato.runtime.artifact_names import WEIGHTS
from ostinato.runtime.gpu.device_weights import DeviceWeights
from ostinato.runtime.memory.vmm import VmmDriver
from ostinato.runtime.memory.vmm_cuda import CudaVmm
from ostinato.runtime.memory.vmm_plain import usable_driver
from ostinato.runtime.program import Bound, bind

log = logging.getLogger(__name__)


class GpuModel:
    """A model ready to run on a GPU; as `artifact.LoadedModel`, with what sleeping needs."""

    def __init__(self, folder: Path, manifest: Manifest, weights: DeviceWeights, run: Bound) -> None:
        self.folder, self.manifest, self.facts = folder, manifest, manifest.facts
        self.weights, self._run = weights, run
        self.device = weights.device

    def __call__(self, inputs: StepInputs | PoolInputs, kv: Sequence[Tensor]) -> Tensor:
        return self._run(inputs, kv)

    def start_team(self) -> None:
        """A GPU needs no compute threads."""

    def name_calls(self, named: bool) -> None:
        """Kernels of a GPU have their names."""

    def close(self) -> None:
        """Let go of the weights' memory."""
        del self._run
        self.weights.close()


def gpu_driver(device: torch.device) -> VmmDriver:
    """Elastic memory of the device, or plain memory with a warning that says why."""
    return usable_driver(CudaVmm(device))


def load_gpu(folder: Path, manifest: Manifest, device: torch.device) -> GpuModel:
    """Load an artifact that was compiled for this kind of GPU; nothing is compiled from here on.

    The files other than the weights are verified already. Raises ArtifactError, VmmError.
    """
    began = time.perf_counter()
    torch.cuda.set_device(device)
    pools = manifest.facts.pooling is not None
    ops: Mapping[str, Callable[..., Any]] = {}
    if not pools:  # see pool_target.py
        # a table that the manifest does not have was not verified
        attends = attention_choice.read(folder) if attention_choice.FILE in manifest.files else {}
        ops = launchers(tuning.read(folder), attends)
        STORE.read(folder)
        STORE.is_sealed = True
    weights = DeviceWeights(folder / WEIGHTS, gpu_driver(device))
    try:
        digest = weights.fill()
        if digest != manifest.files[WEIGHTS].digest:
            raise ArtifactError(
                f"{folder / WEIGHTS}: content does not match the manifest's hash; compile the model again"
            )
        run = (
            bind_pooling(folder, manifest.plans, weights)
            if pools
            else bind_gpu(folder, manifest.plans, weights, ops)
        )
    except BaseException:
        weights.close()
        raise
    seconds = time.perf_counter() - began
    log.info("weights: %d MiB on %s in %.1f s", weights.bytes >> 20, device, seconds)
    return GpuModel(folder, manifest, weights, run)


def bind_gpu(
    folder: Path,
    plans: Sequence[PlanRecord],
    weights: DeviceWeights,
    ops: Mapping[str, Callable[..., Any]],
) -> Bound:
    """What runs a step by the plan for its number of tokens. `ops`: as `launchers` gives them."""
    tensors = weights.tensors()
    programs = [read_program(folder / plan.program) for plan in plans]
    runs = [bind(program, tensors, native=ops, device=weights.device) for program in programs]
    last_tokens = [plan.last for plan in plans]

    def run(inputs: StepInputs | PoolInputs, kv: Sequence[Tensor]) -> Tensor:
        return runs[bisect_left(last_tokens, inputs.token_ids.shape[0])](inputs, kv)

    return run


def bind_pooling(folder: Path, plans: Sequence[PlanRecord], weights: DeviceWeights) -> Bound:
    """The one program of a model that embeds or scores, over torch's own kernels: see pool_target.py."""
    program = read_program(folder / plans[0].program)
    return bind(program, weights.tensors(), native=torch_ops(), device=weights.device)


def torch_ops() -> dict[str, Callable[..., Any]]:
    """Each of our ops as torch computes it on any device, without a kernel of ours."""
    made: dict[str, Callable[..., Any]] = {
        f"ostinato::{name}": reference
        for name, module in vars(all_ops).items()
        if (reference := getattr(module, f"{name}_reference", None)) is not None
    }
    return made | {"ostinato::varlen_attention": varlen_attention._launch}


def launchers(
    choices: tuning.Choices, attention: attention_choice.Choices | None = None
) -> dict[str, Callable[..., Any]]:
    """The GPU side of each of our ops, called without torch's dispatcher: that saves half of a launch.

    `choices`, `attention`: of the artifact, for the ops that have some.
    """
    made: dict[str, Callable[..., Any]] = {
        f"ostinato::{name}": module._launch
        for name, module in vars(all_ops).items()
        if hasattr(module, "_launch")
    }
    for name in tuning.OPS:
        made[f"ostinato::{name}"] = partial(made[f"ostinato::{name}"], choices=choices)
    for name in attention_choice.OPS:
        made[f"ostinato::{name}"] = partial(made[f"ostinato::{name}"], choices=attention)
    return made
