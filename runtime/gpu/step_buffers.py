"""Everything of a step that changes, at fixed device addresses, filled by one copy from pinned memory.

T tokens, S sequences, R rows of logits of a step's shape; the layout of a shape depends on the shape alone,
so a graph captured for it reads the same addresses for ever. Rows past those of the plan are inert: they
write no KV (slot -1), belong to sequences without tokens, and their samples go nowhere.

Block tables stay on the device, one row per place in the step; only entries that changed travel.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.runner import StepShape
from ostinato.runtime.scheduling.plan import PENDING, Plan, PlanEntry

Ints = NDArray[np.integer[Any]]
ALIGN = 64  # bytes; kernels are compiled for addresses that are multiples of 16
_NUM_HOST = 3  # pinned copies: one being filled, those of the two steps in flight


class _Field(NamedTuple):
    name: str
    dtype: type[np.integer[Any]]
    size: int  # elements
    offset: int  # bytes


class HostStep(NamedTuple):
    """One step in pinned memory, as arrays to be filled."""

    token_ids: Ints  # int64 [T]
    positions: Ints  # int64 [T]
    slot_mapping: Ints  # int64 [T]
    logit_rows: Ints  # int64 [R]
    seq_lens: Ints  # int32 [S]
    query_start: Ints  # int32 [S + 1]
    samples: Ints  # uint8 [bytes]; the sampler's


class StepBuffers:
    """The input side of a step. One thread uses it; all device work goes to the current stream."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        table_width: int,
        block_tokens: int,
        sample_bytes: int,
        device: torch.device,
    ) -> None:
        """`sample_bytes`: of a row of the sampler's parameters. `table_width`: most blocks of a sequence."""
        self.device, self.block_tokens = device, block_tokens
        self._sample_bytes = sample_bytes
        size = self._layout(StepShape(max_tokens, max_sequences, max_tokens))[-1]
        self._bytes = size.offset + size.size
        self._staged = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._pinned = [
            torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_NUM_HOST)
        ]
        self._turn = 0
        self.tables = torch.zeros(max_sequences, table_width, dtype=torch.int32, device=device)
        self._matrix: Ints = np.zeros((max_sequences, table_width), np.int32)
        self._rows: list[tuple[int, ...]] = [()] * max_sequences  # what each row of the tables holds

    def _layout(self, shape: StepShape) -> list[_Field]:
        fields, at = [], 0
        sizes: list[tuple[str, type[np.integer[Any]], int]] = [
            ("token_ids", np.int64, shape.tokens),
            ("positions", np.int64, shape.tokens),
            ("slot_mapping", np.int64, shape.tokens),
            ("logit_rows", np.int64, shape.logit_rows),
            ("seq_lens", np.int32, shape.sequences),
            ("query_start", np.int32, shape.sequences + 1),
            ("samples", np.uint8, shape.logit_rows * self._sample_bytes),
        ]
        for name, dtype, count in sizes:
            fields.append(_Field(name, dtype, count, at))
            at += -(-count * np.dtype(dtype).itemsize // ALIGN) * ALIGN
        return fields

    def inputs(self, shape: StepShape) -> tuple[StepInputs, Tensor]:
        """The device side of a shape: what the program reads, and the sampler's bytes."""
        views: dict[str, Tensor] = {}
        for name, dtype, count, offset in self._layout(shape):
            whole = self._staged[offset : offset + count * np.dtype(dtype).itemsize]
            views[name] = whole.view(getattr(torch, np.dtype(dtype).name))
        samples = views.pop("samples")
        return StepInputs(block_tables=self.tables[: shape.sequences], **views), samples

    def host(self, shape: StepShape) -> HostStep:
        """The next pinned copy; the one before last may still be on its way to the device."""
        self._turn = (self._turn + 1) % _NUM_HOST
        whole = self._pinned[self._turn].numpy()
        return HostStep(
            **{
                name: whole[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)
                for name, dtype, count, offset in self._layout(shape)
            }
        )

    def fill(
        self,
        plan: Plan,
        shape: StepShape,
        slots: dict[str, int],
        host: HostStep,
        *,
        every_wanted: bool = False,
    ) -> None:
        """Write a plan. `slots`: request -> place of its newest token; rows past the plan are made inert.

        Logit row i is the last token of sequence i; with `every_wanted` the rows are those of the plan.
        """
        entries = plan.entries
        count, tokens = len(entries), plan.num_tokens
        starts = np.fromiter((entry.start for entry in entries), np.int64, count)
        changes = self._changed_tables(entries)
        if tokens == count:  # a decode step: one token each
            lengths: Ints = np.ones(count, np.int64)
            row_of_token: Ints = np.arange(count)
            host.positions[:count] = starts
            host.query_start[: count + 1] = np.arange(count + 1)
        else:
            lengths = np.fromiter((len(entry.token_ids) for entry in entries), np.int64, count)
            host.query_start[0] = 0
            np.cumsum(lengths, out=host.query_start[1 : count + 1])
            row_of_token = np.repeat(np.arange(count), lengths)
            begins = starts - host.query_start[:count]
            np.add(np.arange(tokens), begins[row_of_token], out=host.positions[:tokens])
        block, offset = np.divmod(host.positions[:tokens], self.block_tokens)
        np.add(
            self._matrix[row_of_token, block].astype(np.int64) * self.block_tokens,
            offset,
            out=host.slot_mapping[:tokens],
        )
        host.token_ids[:tokens] = np.fromiter(
            chain.from_iterable(entry.token_ids for entry in entries), np.int64, tokens
        )
        last = host.query_start[1 : count + 1].astype(np.int64) - 1
        for place, entry in zip(last, entries, strict=True):
            if entry.token_ids[-1] == PENDING:
                host.token_ids[place] = -1 - slots[entry.request_id]
        np.add(starts, lengths, out=host.seq_lens[:count], casting="unsafe")
        rows = _wanted_rows(plan) if every_wanted else last
        host.logit_rows[: len(rows)] = rows
        host.logit_rows[len(rows) :] = 0
        host.token_ids[tokens:] = 0
        host.positions[tokens:] = 0
        host.slot_mapping[tokens:] = -1
        host.seq_lens[count:] = 0
        host.query_start[count + 1 :] = tokens
        self._send_tables(changes)

    def send(self, shape: StepShape) -> None:
        """Copy what was filled to the device."""
        last = self._layout(shape)[-1]
        end = last.offset + last.size
        self._staged[:end].copy_(self._pinned[self._turn][:end], non_blocking=True)

    def clear_tables(self, sequences: int) -> None:
        """Point every entry of the first rows to block 0; the next `fill` writes them anew."""
        self.tables[:sequences].zero_()
        self._matrix[:sequences] = 0
        self._rows[:sequences] = [()] * sequences

    def _changed_tables(self, entries: tuple[PlanEntry, ...]) -> list[tuple[int, int, int]]:
        """Bring the host's tables up to date; (row, first, stop) of what is new."""
        changes = []
        for row, entry in enumerate(entries):
            held, wanted = self._rows[row], entry.block_ids
            if held is wanted:
                continue
            first = len(held) if len(held) < len(wanted) and wanted[: len(held)] == held else 0
            self._matrix[row, first : len(wanted)] = wanted[first:]
            self._rows[row] = wanted
            if first < len(wanted):
                changes.append((row, first, len(wanted)))
        return changes

    def _send_tables(self, changes: list[tuple[int, int, int]]) -> None:
        if not changes:
            return
        width = self._matrix.shape[1]
        at = np.concatenate([np.arange(row * width + a, row * width + b) for row, a, b in changes])
        values = np.concatenate([self._matrix[row, a:b] for row, a, b in changes])
        packed = np.concatenate([at, values.astype(np.int64)])
        host = torch.from_numpy(packed)
        moved = (host.pin_memory() if self.device.type == "cuda" else host).to(self.device, non_blocking=True)
        self.tables.view(-1)[moved[: len(at)]] = moved[len(at) :].int()


def _wanted_rows(plan: Plan) -> Ints:
    rows, end = [], 0
    for entry in plan.entries:
        end += len(entry.token_ids)
        rows.append(np.arange(end - entry.num_logit_rows, end))
    return np.concatenate(rows)
