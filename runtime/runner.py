"""From a plan to logits: builds the step's input tensors and calls the model.

T tokens of the step, B sequences, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.graph.facts import ModelFacts
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.scheduling.plan import Plan, PlanEntry
from ostinato.runtime.sleeping_weights import Weights

Ints = NDArray[np.integer[Any]]  # int32 or int64, as ops/step_inputs.py says


class Model(Protocol):
    """What the engine needs of a loaded artifact."""

    facts: ModelFacts
    folder: Path
    device: torch.device

    @property
    def weights(self) -> Weights:
        """Who holds the memory of its weights."""
        ...

    def start_team(self) -> None:
        """Start the compute threads of its kernels, if they have their own, for the caller to bind."""

    def name_calls(self, named: bool, /) -> None:
        """Whether kernels that torch does not know have names in a profile, which costs a little."""

    def __call__(self, inputs: StepInputs, kv: Sequence[Tensor], /) -> Tensor:
        """Logits [R, V] of the wanted rows; writes this step's K and V into the planes."""


class StepShape(NamedTuple):
    """Sizes of the tensors of one step."""

    tokens: int
    sequences: int
    logit_rows: int


class KVPlane(Tensor):
    """A KV plane that can be printed: a plain tensor's `repr` reads blocks that have no memory, and dies.

    Tracebacks, debuggers and error reporters print arguments.  Results of operations are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # stub differs

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # base is untyped
        return f"KVPlane({list(self.shape)}, {self.dtype}, {self.device})"


class Runner:
    """Owns the input buffers. One thread uses it; a step's inputs are valid until the next `run`."""

    def __init__(self, model: Model, planes: Sequence[Tensor], *, block_tokens: int) -> None:
        self._model = model
        self._planes = tuple(plane.as_subclass(KVPlane) for plane in planes)
        self._block_tokens = block_tokens
        self._tables = _BlockTables()
        self._buffers = {name: _Buffer(dtype) for name, dtype in _DTYPES.items()}

    def run(self, plan: Plan) -> Tensor:
        """Logits [R, V] of the plan's wanted rows: entry by entry, in order."""
        with torch.inference_mode():
            return self._model(self.inputs(plan), self._planes)

    def inputs(self, plan: Plan) -> StepInputs:
        """The step's tensors, as views of reused buffers."""
        entries, shape = plan.entries, self.shape(plan)
        tables = self._tables.rows(entries)
        lengths = np.fromiter((len(entry.token_ids) for entry in entries), np.int32, shape.sequences)
        starts = np.fromiter((entry.start for entry in entries), np.int32, shape.sequences)
        query_start = self._buffers["query_start"].take(shape.sequences + 1)
        query_start[0] = 0
        np.cumsum(lengths, out=query_start[1:])
        row_of_token = np.repeat(np.arange(shape.sequences), lengths)
        positions = self._buffers["positions"].take(shape.tokens)
        np.add(np.arange(shape.tokens), (starts - query_start[:-1])[row_of_token], out=positions)
        block, offset = np.divmod(positions, self._block_tokens)
        slots = self._buffers["slot_mapping"].take(shape.tokens)
        np.add(tables[row_of_token, block].astype(np.int64) * self._block_tokens, offset, out=slots)
        ids = self._buffers["token_ids"].take(shape.tokens)
        ids[:] = np.fromiter(
            chain.from_iterable(entry.token_ids for entry in entries), np.int64, shape.tokens
        )
        seq_lens = self._buffers["seq_lens"].take(shape.sequences)
        np.add(starts, lengths, out=seq_lens)
        logit_rows = self._buffers["logit_rows"].take(shape.logit_rows)
        logit_rows[:] = np.fromiter(_logit_rows(entries), np.int64, shape.logit_rows)
        return StepInputs(
            token_ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            block_tables=torch.from_numpy(tables),
            seq_lens=torch.from_numpy(seq_lens),
            query_start=torch.from_numpy(query_start),
            logit_rows=torch.from_numpy(logit_rows),
        )

    def shape(self, plan: Plan) -> StepShape:
        """The one place that decides the sizes a step runs with.

        CPU programs take any T, so these are the plan's own.  A back end that replays captured graphs rounds
        up to a bucket here and fills the extra rows inertly (slot -1, no logits); where no bucket fits it
        counts the reason and runs the plan as it is.
        """
        wanted = sum(entry.num_logit_rows for entry in plan.entries)
        return StepShape(tokens=plan.num_tokens, sequences=len(plan.entries), logit_rows=wanted)


_DTYPES: dict[str, type[np.integer[Any]]] = {
    "token_ids": np.int64,
    "positions": np.int64,
    "slot_mapping": np.int64,
    "seq_lens": np.int32,
    "query_start": np.int32,
    "logit_rows": np.int64,
}


class _Buffer:
    """A growing array; `take(n)` is its first n elements."""

    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self._array: Ints = np.zeros(64, dtype)

    def take(self, size: int) -> Ints:
        if size > len(self._array):
            self._array = np.zeros(max(size, 2 * len(self._array)), self._array.dtype)
        return self._array[:size]


class _BlockTables:
    """The step's block tables [B, M]; a row is rewritten only when its sequence or blocks have changed."""

    def __init__(self) -> None:
        self._matrix: Ints = np.zeros((0, 0), np.int32)
        self._written: list[tuple[int, ...] | None] = []  # what each row of the matrix holds

    def rows(self, entries: tuple[PlanEntry, ...]) -> Ints:
        """Contiguous int32 [B, M] in the order of the entries; what is past a sequence's blocks is stale."""
        height, width = len(entries), max(len(entry.block_ids) for entry in entries)
        if height > self._matrix.shape[0] or width > self._matrix.shape[1]:
            size = [
                max(8, 1 << (need - 1).bit_length(), old)
                for need, old in zip((height, width), self._matrix.shape, strict=True)
            ]
            self._matrix, self._written = np.zeros(size, np.int32), [None] * size[0]
        for row, entry in enumerate(entries):
            if self._written[row] is not entry.block_ids:  # the scheduler gives the same tuple while it holds
                self._matrix[row, : len(entry.block_ids)] = entry.block_ids
                self._written[row] = entry.block_ids
        return self._matrix[:height]


def _logit_rows(entries: tuple[PlanEntry, ...]) -> Iterator[int]:
    """Rows of the step, over all sequences, whose logits are wanted."""
    end = 0
    for entry in entries:
        end += len(entry.token_ids)
        yield from range(end - entry.num_logit_rows, end)
