"""Every kernel of a model, launched once: how `compile-model` learns which variants an artifact must hold.

Which variant a launch needs follows from the model and three numbers of the step's shape, each of which falls
into few classes; a shape of each class is rehearsed.  A test compares with all shapes of many models.
- T tokens. A skinny product has kernels for 1, 2, 4, 8 and 16 tokens (`token_block`), and on Hopper tiles for
  each class up to 256 (`tuning.CLASSES`). A lone row may have another stride than rows of which there are
  several. More tokens are one class.
- R rows of logits, for the head and the sampler: as T.
- S sequences, for attention: as many as tokens, one, or several with more tokens; of each of these, the
  classes of tokens whose ways are measured (`attention_choice`).
Sizes of grids, integers in `do_not_specialize` and table widths make no variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ostinato.graph.capture import MAX_STEP_TOKENS
from ostinato.graph.facts import ModelFacts
from ostinato.ops import attention_choice, tuning
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.config import EngineConfig, resolve
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.program import Bound
from ostinato.runtime.runner import StepShape
from ostinato.runtime.sleeping_weights import FixedWeights

SIZES = (*tuning.CLASSES, 512)  # of tokens and of rows; more than the last class are one


def rehearsal_shapes() -> list[StepShape]:
    """A shape of each class that a server of any settings can form, smallest first."""
    decode = [StepShape(size, size, size) for size in SIZES]
    mixed = [
        StepShape(size, sequences, sequences) for size in SIZES for sequences in (1, 2) if sequences < size
    ]
    mixed += [StepShape(size, sequences, 1) for size in attention_choice.PREFILL for sequences in (1, 2)]
    rows = [StepShape(size, 1, rows) for size in SIZES[-2:] for rows in SIZES if rows <= size]
    return sorted({*decode, *mixed, *rows})


def rehearse(backend: GpuBackend) -> None:
    """Run each of them once."""
    for shape in rehearsal_shapes():
        backend.rehearse(shape)


def rehearsing_backend(
    run: Bound, facts: ModelFacts, config: EngineConfig, device: torch.device
) -> GpuBackend:
    """A back end over a program and two blocks of random KV, with room for these shapes; `shut` it."""
    config = resolve(config, device.type)
    largest = {"max_step_tokens": MAX_STEP_TOKENS, "max_running": SIZES[-1]}
    scheduler = config.scheduler.model_copy(update=largest)
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
    return GpuBackend(_Rehearsed(facts, run, device), planes, config, window=window, stream=stream)


class _Rehearsed:
    """A program as a model."""

    folder = Path("rehearsal")
    weights = FixedWeights()

    def __init__(self, facts: ModelFacts, run: Bound, device: torch.device) -> None:
        self.facts, self._run, self.device = facts, run, device

    def name_calls(self, named: bool) -> None:
        """Nothing of it is profiled."""

    def start_team(self) -> None:
        """A GPU needs no compute threads."""

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor]) -> Tensor:
        return self._run(inputs, kv)
