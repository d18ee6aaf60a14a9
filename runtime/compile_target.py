"""What a compile does for one kind of device: programs, kernels, and a model to prove.

A CPU has one program and kernels built by the system's compiler while the model is traced. A GPU has two
programs, the one for few tokens (16, on Hopper 256) with kernels of its own; its kernels are compiled by
running a step of each class of shapes, on the weights, when they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import fx

from ostinato.errors import ConfigError
from ostinato.graph.capture import MAX_STEP_TOKENS
from ostinato.graph.facts import ModelFacts
from ostinato.ops import native
from ostinato.passes.base import PassReport
from ostinato.runtime.artifact import PlanRecord, Target, bind_files, this_target
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.program import Bound

ANY = "program.json"


class Plan(NamedTuple):
    """One program of the artifact, and the graph that it is made of."""

    record: PlanRecord
    graph_module: fx.GraphModule
    reports: Sequence[PassReport]


class CompileTarget(Protocol):
    """Compiles for one device. Used once, stage by stage; `close` comes in any case."""

    device: torch.device

    def plans(self, fused: fx.GraphModule, config: EngineConfig, reports: Sequence[PassReport]) -> list[Plan]:
        """The programs, by rising number of tokens, from a graph that all ordinary passes have rewritten.

        `reports` are those of these passes.
        """
        ...

    def make_kernels(self, plans: Sequence[PlanRecord], config: EngineConfig, facts: ModelFacts) -> float:
        """Leave the kernels in the folder, where weights and programs are already; seconds of compilers."""
        ...

    def load(self, plans: Sequence[PlanRecord]) -> Bound:
        """The programs over weights and kernels, for the proof."""
        ...

    def described(self) -> tuple[Target, str]:
        """The machine that the kernels are for, and the compiler that made them."""
        ...

    def close(self) -> None:
        """Free what the compile took."""
        ...


def chosen_device(name: str) -> torch.device:
    """The device of a `graph.target`. ConfigError: it is not there."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "graph.target=cuda: torch finds no GPU here; use cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda", torch.cuda.current_device())


def open_target(folder: Path, config: EngineConfig, *, pools: bool) -> CompileTarget:
    """The target that the settings name, with its background work begun. `pools`: no model to generate."""
    device = chosen_device(config.graph.target)
    if device.type == "cpu":
        return CpuTarget(folder)
    if pools:
        from ostinato.runtime.gpu.pool_target import GpuPoolTarget  # needs what only a GPU machine has

        return GpuPoolTarget(folder, device)
    from ostinato.runtime.gpu.gpu_target import GpuTarget  # needs what only a GPU machine has

    return GpuTarget(folder, device)


class CpuTarget:
    """One program for every step; native kernels, built while the model is read and traced."""

    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._background = ThreadPoolExecutor(1)
        self._building: Future[native.BuildInfo] = self._background.submit(
            native.build, folder / "kernels.so"
        )

    def plans(self, fused: fx.GraphModule, config: EngineConfig, reports: Sequence[PassReport]) -> list[Plan]:
        """One for all."""
        return [Plan(PlanRecord(first=1, last=MAX_STEP_TOKENS, program=ANY), fused, ())]

    def make_kernels(self, plans: Sequence[PlanRecord], config: EngineConfig, facts: ModelFacts) -> float:
        """Wait for the build."""
        return self._building.result().seconds

    def load(self, plans: Sequence[PlanRecord]) -> Bound:
        """As a server binds them."""
        return bind_files(self._folder, plans)[0]

    def described(self) -> tuple[Target, str]:
        """The features that the compiler was allowed to use."""
        made = self._building.result()
        target = this_target(self.device).model_copy(update={"features": made.cpu_features})
        return target, f"{made.compiler} {made.version}"

    def close(self) -> None:
        """Wait for the compiler, also after an error: it writes into the folder."""
        self._background.shutdown()
