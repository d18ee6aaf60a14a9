"""A GPU's programs and back end over CPU memory, with launches only noted: which variants a step needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ostinato.graph.capture import CapturedGraph
from ostinato.ops import all_ops, cuda_kernels, kernel_store, tuning, wgmma_linear
from ostinato.ops.step_inputs import StepInputs
from ostinato.passes import pipeline
from ostinato.runtime.compile_target import Plan
from ostinato.runtime.config import EngineConfig, KVConfig, SchedulerConfig
from ostinato.runtime.gpu import gpu_target, rehearsal
from ostinato.runtime.gpu.gpu_model import launchers
from ostinato.runtime.gpu.gpu_target import GpuTarget
from ostinato.runtime.program import Bound, bind, lower
from ostinato.runtime.runner import StepShape

CPU = torch.device("cpu")


class DryGpu:
    """A traced model as a GPU would run it; `variants` says what a step of a shape launches."""

    def __init__(
        self, captured: CapturedGraph, choices: tuning.Choices, ops: Mapping[str, Any] | None = None
    ) -> None:
        """`ops`: in the place of some launchers."""
        config = EngineConfig(kv=KVConfig(block_tokens=4), scheduler=SchedulerConfig(max_waiting=8))
        reports = pipeline.run(captured.graph_module, config.passes, captured.facts.expected_matches)
        with patch.object(gpu_target, "capability", lambda _: 90):
            plans = GpuTarget(Path(), CPU).plans(captured.graph_module, config, reports)
        with without_gpu():
            run = _by_tokens(plans, launchers(choices) | dict(ops or {}))
            self.backend = rehearsal.rehearsing_backend(run, captured.facts, config, CPU)

    def variants(self, shape: StepShape) -> frozenset[str]:
        """Keys of what a step launches; nothing is."""
        with without_gpu(), kernel_store.STORE.recording(is_dry=True) as noted:
            self.backend.rehearse(shape)
        return frozenset(noted.variants)


def _by_tokens(plans: list[Plan], ops: Mapping[str, Any]) -> Bound:
    runs = [_bound(plan, ops) for plan in plans]

    def run(inputs: StepInputs, kv: Any) -> Tensor:
        tokens = inputs.token_ids.shape[0]
        at = next(i for i, plan in enumerate(plans) if tokens <= plan.record.last)
        return runs[at](inputs, kv)

    return run


def _bound(plan: Plan, ops: Mapping[str, Any]) -> Bound:
    """The program over weights of zeros."""
    weights = {
        node.name: torch.zeros([int(size) for size in node.meta["val"].shape], dtype=node.meta["val"].dtype)
        for node in plan.graph_module.graph.nodes
        if node.op == "placeholder" and node.meta["role"] == "weight" and node.users
    }
    program = lower(plan.graph_module, {name: name for name in weights})
    return bind(program, weights, native=ops, device=CPU)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Streams that do nothing, memory that is not pinned, and the GPU side of every op for CPU tensors."""
    zeros = torch.zeros

    def unpinned(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return zeros(*size, **kwargs)

    nothing = SimpleNamespace(
        synchronize=lambda: None, wait_stream=lambda _: None, record=lambda _=None: None
    )
    cuda = {
        "set_stream": lambda _: None,
        "Event": lambda: nothing,
        "Stream": lambda _: nothing,
        "current_stream": lambda _: nothing,
        "graph_pool_handle": lambda: None,
    }
    hopper = {
        "is_hopper": lambda _: True,
        "multiprocessors": lambda _: 132,
        "matrix_map": lambda *_: b"",
    }
    ops = [module for module in vars(all_ops).values() if hasattr(module, "_launch")]
    with (
        patch.object(torch, "zeros", unpinned),
        patch.multiple(torch.cuda, **cuda),
        patch.object(kernel_store, "capability_here", lambda: 90),
        patch.object(cuda_kernels, "capability", lambda _: 90),
        patch.object(torch._C, "_cuda_getDevice", lambda: 0, create=True),
        patch.multiple(wgmma_linear, **hopper),
    ):
        before = [module.OP for module in ops]
        for module in ops:
            module.OP = module._launch
        try:
            yield
        finally:
            for module, op in zip(ops, before, strict=True):
                module.OP = op
