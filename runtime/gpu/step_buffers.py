"""Inputs of a step in fixed places: pinned on the host, one copy, the same device addresses for every step.

A step runs in a shape (`StepShape`: T tokens, B sequences, R logit rows) that is at least as large as its
plan. All fields of a shape lie one behind the other, so that one copy brings them; a captured graph of that
shape reads them at the same addresses for ever. Rows past those of the plan are inert: they
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
from ostinato.runtime.scheduling.plan import ONE_PENDING, PENDING, Plan

Ints = NDArray[np.integer[Any]]
ALIGN = 64  # bytes; kernels are compiled for addresses that are multiples of 16
_NUM_HOST = 3  # pinned copies: one being filled, those of the two steps in flight
_MOST_SHAPES = 512  # whose views are kept; captured ones are about 30, any other is one of a kind
_CHANGES = 512  # entries of block tables that travel at once
_CHANGE_BYTES = 12  # of one: its place, int64, and the block, int32
_FEW = 8  # rows up to which Python's integers are faster than numpy's calls


class Columns(NamedTuple):
    """The entries of a plan by field: of `PlanEntry`, in its order."""

    request_id: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    logits_from: tuple[int, ...]
    output_index: tuple[int, ...]
    prompt_tokens: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Columns:
        """Those of a plan: numpy and zip take whole fields faster than entries one by one."""
        return cls._make(zip(*plan.entries, strict=True))


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
    samples: NDArray[np.int64]  # [words]; the sampler's


class _Views(NamedTuple):
    """A shape's fields on the device, and in each pinned copy with what the copy is made of."""

    inputs: StepInputs
    samples: Tensor
    hosts: list[HostStep]
    sources: list[Tensor]
    target: Tensor


class _Changes(NamedTuple):
    """N changed entries of the block tables on their way: places, int64, then blocks, int32."""

    sources: list[Tensor]
    target: Tensor
    at: Tensor
    blocks: Tensor


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
        """`sample_bytes`: of a row of the sampler's parameters, a multiple of 8. `table_width`: most blocks
        of a sequence."""
        self.device, self.block_tokens = device, block_tokens
        self._sample_bytes = sample_bytes
        size = self._layout(StepShape(max_tokens, max_sequences, max_tokens))[-1]
        self._bytes = size.offset + size.size * 8
        self._staged = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        self._pinned = [self._pinned_zeros(self._bytes) for _ in range(_NUM_HOST)]
        self._turn = 0
        self._views: dict[StepShape, _Views] = {}
        self._decodes: list[tuple[StepShape, int] | None] = [None] * _NUM_HOST  # (shape, rows) of each copy
        self._held_decode: tuple[StepShape, int] | None = None  # what the copy in hand was before
        self.tables = torch.zeros(max_sequences, table_width, dtype=torch.int32, device=device)
        self._flat_tables = self.tables.view(-1)
        self._staged_changes = torch.zeros(_CHANGE_BYTES * _CHANGES, dtype=torch.uint8, device=device)
        self._pinned_changes = [self._pinned_zeros(_CHANGE_BYTES * _CHANGES) for _ in range(_NUM_HOST)]
        self._changes: dict[int, _Changes] = {}  # by number of entries
        self._matrix: Ints = np.zeros((max_sequences, table_width), np.int32)
        self._flat: Ints = self._matrix.reshape(-1)
        self._row_at: Ints = np.arange(max_sequences) * table_width
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
            ("samples", np.int64, shape.logit_rows * self._sample_bytes // 8),
        ]
        for name, dtype, count in sizes:
            fields.append(_Field(name, dtype, count, at))
            at += -(-count * np.dtype(dtype).itemsize // ALIGN) * ALIGN
        return fields

    def _viewed(self, shape: StepShape) -> _Views:
        found = self._views.get(shape)
        if found is not None:
            return found
        layout = self._layout(shape)
        ends = {field: field.offset + field.size * np.dtype(field.dtype).itemsize for field in layout}
        end = ends[layout[-1]]
        staged: dict[str, Tensor] = {
            field.name: self._staged[field.offset : stop].view(getattr(torch, np.dtype(field.dtype).name))
            for field, stop in ends.items()
        }
        samples = staged.pop("samples")
        hosts = []
        for pinned in self._pinned:
            whole = pinned.numpy()
            hosts.append(
                HostStep(**{f.name: whole[f.offset : stop].view(f.dtype) for f, stop in ends.items()})
            )
        if len(self._views) >= _MOST_SHAPES:
            self._views.clear()
        self._views[shape] = views = _Views(
            StepInputs(block_tables=self.tables[: shape.sequences], **staged),
            samples,
            hosts,
            [pinned[:end] for pinned in self._pinned],
            self._staged[:end],
        )
        return views

    def inputs(self, shape: StepShape) -> tuple[StepInputs, Tensor]:
        """The device side of a shape: what the program reads, and the sampler's words."""
        views = self._viewed(shape)
        return views.inputs, views.samples

    def host(self, shape: StepShape) -> HostStep:
        """The next pinned copy; the one before last may still be on its way to the device."""
        turn = self._turn = (self._turn + 1) % _NUM_HOST
        self._held_decode, self._decodes[turn] = self._decodes[turn], None
        return self._viewed(shape).hosts[turn]

    def fill(
        self,
        plan: Plan,
        shape: StepShape,
        slots: Ints,
        host: HostStep,
        *,
        every_wanted: bool = False,
        columns: Columns | None = None,
    ) -> None:
        """Write a plan into what `host` just gave; rows past the plan are made inert.

        `slots`: the place of each sequence's newest token, int64. `columns`: those of the plan's entries.
        Logit row i is the last token of sequence i; with `every_wanted` the rows are those of the plan.
        """
        if columns is None:
            columns = Columns.of(plan)
        changes = self._changed_tables(columns.block_ids)
        try:
            if plan.num_tokens == len(plan.entries) and not every_wanted:
                self._fill_decode(columns, shape, slots, host)
            else:
                self._fill_any(plan, columns, shape, slots, host, every_wanted=every_wanted)
            if changes:
                self._send_tables(changes)
        except BaseException:
            self._rows = [()] * len(self._rows)  # what of the tables has reached the device is not known
            raise

    def _fill_decode(self, columns: Columns, shape: StepShape, slots: Ints, host: HostStep) -> None:
        """One token for each sequence. What only the number of rows decides is left if it stands there."""
        token_ids, starts, tables = columns.token_ids, columns.start, columns.block_ids
        count, size = len(starts), self.block_tokens
        if self._held_decode != (shape, count):
            rows = np.arange(count + 1)
            host.query_start[: count + 1] = rows
            host.logit_rows[:count] = rows[:count]
            _make_inert(host, count, count, count)
        self._decodes[self._turn] = (shape, count)
        if count <= _FEW:
            newest = slots.tolist()
            for row in range(count):
                start, (token,) = starts[row], token_ids[row]
                host.token_ids[row] = token if token != PENDING else -1 - newest[row]
                host.positions[row] = start
                host.slot_mapping[row] = tables[row][start // size] * size + start % size
                host.seq_lens[row] = start + 1
            return
        if token_ids == (ONE_PENDING,) * count:
            np.subtract(-1, slots, out=host.token_ids[:count])
        else:
            ids: Ints = np.array(token_ids, np.int64)[:, 0]
            host.token_ids[:count] = np.where(ids == PENDING, -1 - slots, ids)
        start_B: Ints = np.array(starts, np.int64)
        host.positions[:count] = start_B
        np.add(start_B, 1, out=host.seq_lens[:count], casting="unsafe")
        block_B = start_B // size
        start_B -= block_B * size
        block_B += self._row_at[:count]
        np.add(self._flat[block_B].astype(np.int64) * size, start_B, out=host.slot_mapping[:count])

    def _fill_any(
        self,
        plan: Plan,
        columns: Columns,
        shape: StepShape,
        slots: Ints,
        host: HostStep,
        *,
        every_wanted: bool,
    ) -> None:
        count, tokens = len(plan.entries), plan.num_tokens
        starts: Ints = np.array(columns.start, np.int64)
        lengths: Ints = np.fromiter(map(len, columns.token_ids), np.int64, count)
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
        host.token_ids[:tokens] = np.fromiter(chain.from_iterable(columns.token_ids), np.int64, tokens)
        last = host.query_start[1 : count + 1].astype(np.int64) - 1
        pending = host.token_ids[last] == PENDING
        host.token_ids[last[pending]] = -1 - slots[pending]
        np.add(starts, lengths, out=host.seq_lens[:count], casting="unsafe")
        rows = _wanted_rows(plan) if every_wanted else last
        host.logit_rows[: len(rows)] = rows
        _make_inert(host, tokens, count, len(rows))

    def send(self, shape: StepShape) -> None:
        """Copy what was filled to the device."""
        views = self._viewed(shape)
        views.target.copy_(views.sources[self._turn], non_blocking=True)

    def clear_tables(self, sequences: int) -> None:
        """Point every entry of the first rows to block 0; the next `fill` writes them anew."""
        self.tables[:sequences].zero_()
        self._matrix[:sequences] = 0
        self._rows[:sequences] = [()] * sequences

    def _changed_tables(self, tables: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]]:
        """Bring the host's tables up to date; (row, first, stop) of what is new."""
        changes = []
        rows, matrix = self._rows, self._matrix
        for row, wanted in enumerate(tables):
            held = rows[row]
            if held is wanted:
                continue
            known, length = len(held), len(wanted)
            rows[row] = wanted
            if known == length - 1 and wanted[:known] == held:  # one more block
                matrix[row, known] = wanted[known]
                changes.append((row, known, length))
                continue
            first = known if known < length and wanted[:known] == held else 0
            matrix[row, first:length] = wanted[first:]
            if first < length:
                changes.append((row, first, length))
        return changes

    def _send_tables(self, changes: list[tuple[int, int, int]]) -> None:
        """Entries in their order: a decode step has few, and they travel through a buffer made at start."""
        width = self._matrix.shape[1]
        if all(stop - first == 1 for _, first, stop in changes):
            at: Ints = np.array([row * width + first for row, first, _ in changes], np.int64)
        else:
            at = np.concatenate([np.arange(row * width + a, row * width + b) for row, a, b in changes])
        for begin in range(0, len(at), _CHANGES):
            part = at[begin : begin + _CHANGES]
            views = self._change_views(len(part))
            # the first part has a pinned copy of its own in each turn; later ones may still be under way
            source = views.sources[self._turn] if begin == 0 else self._pinned_zeros(views.target.numel())
            bytes_: Ints = source.numpy()
            bytes_[: 8 * len(part)].view(np.int64)[:] = part
            bytes_[8 * len(part) :].view(np.int32)[:] = self._flat[part]
            views.target.copy_(source, non_blocking=True)
            self._flat_tables.index_copy_(0, views.at, views.blocks)

    def _change_views(self, count: int) -> _Changes:
        found = self._changes.get(count)
        if found is None:
            end = _CHANGE_BYTES * count
            found = self._changes[count] = _Changes(
                [pinned[:end] for pinned in self._pinned_changes],
                self._staged_changes[:end],
                self._staged_changes[: 8 * count].view(torch.int64),
                self._staged_changes[8 * count : end].view(torch.int32),
            )
        return found

    def _pinned_zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def _make_inert(host: HostStep, tokens: int, sequences: int, logit_rows: int) -> None:
    """Rows from these numbers on take part in nothing."""
    host.logit_rows[logit_rows:] = 0
    host.token_ids[tokens:] = 0
    host.positions[tokens:] = 0
    host.slot_mapping[tokens:] = -1
    host.seq_lens[sequences:] = 0
    host.query_start[sequences + 1 :] = tokens


def _wanted_rows(plan: Plan) -> Ints:
    rows, end = [], 0
    for entry in plan.entries:
        end += len(entry.token_ids)
        rows.append(np.arange(end - entry.num_logit_rows, end))
    return np.concatenate(rows)
