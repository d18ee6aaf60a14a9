"""What a step tells the device is the same whether it is made anew or taken over from the step before."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.frames import Events
from ostinato.runtime.gpu.step_buffers import StepBuffers
from ostinato.runtime.messages import Abort
from ostinato.runtime.runner import StepShape
from ostinato.runtime.scheduling.plan import PENDING, Plan, PlanEntry
from ostinato.runtime.token_limits import Limit
from tests.support.no_gpu import HostEngine, NoGpuBackend, NoModel, config, request
from tests.support.sampling_rows import StagedRow, stage_rows


def assert_laid_out(
    inputs: StepInputs, plan: Plan, shape: StepShape, slots: Sequence[int], size: int
) -> None:
    """The definition, entry by entry and token by token."""
    ids, positions, places, lens, starts, last = [], [], [], [], [0], []
    for entry, slot in zip(plan.entries, slots, strict=True):
        for at, token in enumerate(entry.token_ids):
            position = entry.start + at
            ids.append(token if token != PENDING else -1 - slot)
            positions.append(position)
            places.append(entry.block_ids[position // size] * size + position % size)
        lens.append(entry.start + len(entry.token_ids))
        starts.append(len(ids))
        last.append(len(ids) - 1)
    spare, rows = shape.tokens - len(ids), shape.sequences - len(lens)
    assert inputs.token_ids.tolist() == ids + [0] * spare
    assert inputs.positions.tolist() == positions + [0] * spare
    assert inputs.slot_mapping.tolist() == places + [-1] * spare
    assert inputs.seq_lens.tolist() == lens + [0] * rows
    assert inputs.query_start.tolist() == starts + [starts[-1]] * rows
    if shape.logit_rows == shape.sequences:
        assert inputs.logit_rows.tolist() == last + [0] * rows
    tables = inputs.block_tables.tolist()
    for row, entry in enumerate(plan.entries):
        assert tables[row][: len(entry.block_ids)] == list(entry.block_ids)


class Watched:
    """An engine without a device, in which every launched step is compared with its definition."""

    def __init__(self) -> None:
        self.engine = HostEngine(NoModel(), config())
        backend = self.engine._backend
        assert isinstance(backend, NoGpuBackend)
        self.backend, self.buffers = backend, backend._buffers
        self.steps = self.reused = 0
        self._launch, self._send = backend.launch, self.buffers.send
        backend.launch = self.launch  # type: ignore[method-assign]
        self.buffers.send = self.send  # type: ignore[method-assign]

    def launch(self, plan: Plan, limits: Mapping[str, Limit]) -> object:
        self.plan, before = plan, self.backend._decode_rows
        step = self._launch(plan, limits)
        self.reused += before is not None and self.backend._decode_rows is before
        return step

    def send(self, shape: StepShape) -> None:
        self._send(shape)
        self.steps += 1
        entries, live = self.plan.entries, self.backend._open
        slots = [live[entry.request_id].slot for entry in entries]
        inputs, samples = self.buffers.inputs(shape)
        assert_laid_out(inputs, self.plan, shape, slots, self.buffers.block_tokens)
        rows, end = [], 0
        scored = any(entry.prompt_logit_rows for entry in entries)
        for index, (entry, slot) in enumerate(zip(entries, slots, strict=True)):
            end += entry.num_logit_rows
            if entry.samples:
                rows.append(StagedRow(end - 1 if scored else index, slot, entry.output_index))
        words = np.full(len(samples), -1, np.int64)
        stage_rows(self.backend._sampler, words, rows)
        assert samples.tolist() == words.tolist()


SAMPLING: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.0},
    {"min_tokens": 5, "top_k": 7},
    {"logit_bias": {5: 1.0}, "min_tokens": 3},
    {"repetition_penalty": 1.5, "seed": 3},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"bad_word_ids": ((70, 70), (6,)), "min_tokens": 2},
    {"logprobs": 0, "logprob_token_ids": (5, 70), "allowed_token_ids": (5, 70)},
)


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_a_random_day_are_laid_out_and_staged_by_the_definition(seed: int) -> None:
    draw = np.random.default_rng(seed)
    watched = Watched()
    engine = watched.engine
    tokens: dict[str, int] = {}
    wanted: dict[str, int] = {}
    with engine:
        for turn in range(220):
            if draw.random() < (0.7 if turn < 30 else 0.05):
                for _ in range(int(draw.integers(1, 5))):
                    name = f"r{len(wanted)}"
                    wanted[name] = int(draw.integers(5, 90))
                    sampling = SAMPLING[int(draw.integers(len(SAMPLING)))] if draw.random() < 0.4 else {}
                    prompt = int(draw.integers(1, 100))
                    engine.inbox.put(request(name, wanted[name], prompt=prompt, **sampling))
            if draw.random() < 0.03 and wanted:
                engine.inbox.put(Abort(request_ids=(f"r{draw.integers(len(wanted))}",)))
            for message in engine.step():
                assert isinstance(message, Events)
                for event in message.events:
                    tokens[event.request_id] = tokens.get(event.request_id, 0) + len(event.token_ids)
                    if event.finish_reason == "abort":
                        wanted[event.request_id] = tokens[event.request_id]
        while engine.has_work:
            for message in engine.step():
                assert isinstance(message, Events)
                for event in message.events:
                    tokens[event.request_id] = tokens.get(event.request_id, 0) + len(event.token_ids)
        engine.check()
    assert tokens == wanted
    assert watched.reused > 20, "no step was like the one before"
    assert watched.steps > 200


def test_a_request_with_an_id_that_was_there_before_is_staged_as_itself() -> None:
    watched = Watched()
    with watched.engine as engine:
        for seed in (1, 2):
            engine.inbox.put(request("again", 6, seed=seed))
            while engine.has_work or engine.inbox.wait(0):
                engine.step()
    assert watched.steps >= 12
    assert watched.reused > 0


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_a_decode_step_of_any_size_follows_one_of_another_shape(count: int) -> None:
    draw = np.random.default_rng(count)
    buffers = StepBuffers(
        max_tokens=64,
        max_sequences=32,
        table_width=16,
        block_tokens=4,
        sample_bytes=64,
        device=torch.device("cpu"),
    )
    tables = [tuple(draw.permutation(200)[:16].tolist()) for _ in range(32)]
    for turn in range(40):
        rows = count if turn % 7 else int(draw.integers(1, 32))
        width = rows if turn % 5 else int(draw.integers(rows, 33))
        entries = tuple(
            PlanEntry(
                f"r{row}",
                (PENDING if draw.random() < 0.8 else int(draw.integers(400)),),
                turn,
                tables[row][: turn // 4 + 1],
                True,
                0,
                0,
                1,
            )
            for row in range(rows)
        )
        plan, shape = Plan(turn + 1, entries, rows), StepShape(width, width, width)
        slots = draw.permutation(32)[:rows]
        buffers.fill(plan, shape, slots, buffers.host(shape))
        buffers.send(shape)
        assert_laid_out(buffers.inputs(shape)[0], plan, shape, slots.tolist(), 4)


def test_tables_of_more_entries_than_travel_at_once_arrive_whole() -> None:
    buffers = StepBuffers(
        max_tokens=8,
        max_sequences=4,
        table_width=700,
        block_tokens=4,
        sample_bytes=64,
        device=torch.device("cpu"),
    )
    draw = np.random.default_rng(0)
    tables = [tuple(draw.permutation(4000)[:length].tolist()) for length in (700, 3, 513, 512)]
    entries = tuple(
        PlanEntry(f"r{row}", (7,), len(table) * 4 - 1, table, True, 0, 0, 1)
        for row, table in enumerate(tables)
    )
    shape = StepShape(4, 4, 4)
    buffers.fill(Plan(1, entries, 4), shape, np.zeros(4, np.int64), buffers.host(shape))
    for row, table in zip(buffers.tables.tolist(), tables, strict=True):
        assert row[: len(table)] == list(table)
