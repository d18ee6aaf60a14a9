"""Inputs of a step in their fixed places: what the device finds there, after whatever was there before."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ostinato.ops.step_inputs import StepInputs
from ostinato.ops.take_pending import take_pending_reference
from ostinato.runtime.gpu import step_buffers
from ostinato.runtime.gpu.step_buffers import Columns, StepBuffers
from ostinato.runtime.runner import StepShape
from ostinato.runtime.scheduling.plan import PENDING, Plan, PlanEntry

BLOCK = 4


def buffers() -> StepBuffers:
    return StepBuffers(
        max_tokens=32,
        max_sequences=8,
        table_width=8,
        block_tokens=BLOCK,
        sample_bytes=24,
        device=torch.device("cpu"),
    )


def entry(name: str, tokens: Sequence[int], start: int, blocks: tuple[int, ...]) -> PlanEntry:
    return PlanEntry(name, tuple(tokens), start, blocks, True, len(tokens) - 1, 0, 1)


def fed(
    step: StepBuffers,
    shape: StepShape,
    *entries: PlanEntry,
    slots: dict[str, int] | None = None,
    every_wanted: bool = False,
) -> StepInputs:
    plan = Plan(1, entries, sum(len(e.token_ids) for e in entries))
    newest = np.array([(slots or {}).get(e.request_id, 0) for e in entries], np.int64)
    step.fill(plan, shape, newest, step.host(shape), every_wanted=every_wanted)
    step.send(shape)
    return step.inputs(shape)[0]


def test_columns_are_the_fields_of_a_plan_s_entries() -> None:
    assert Columns._fields == PlanEntry._fields
    columns = Columns.of(Plan(1, (entry("a", [7], 5, (3, 1)), entry("b", [8, 9], 2, (6,))), 3))
    assert columns.request_id == ("a", "b")
    assert (columns.token_ids, columns.start, columns.block_ids) == (((7,), (8, 9)), (5, 2), ((3, 1), (6,)))


def test_a_mixed_step_is_laid_out_row_by_row() -> None:
    inputs = fed(buffers(), StepShape(4, 2, 2), entry("a", [7], 5, (3, 1)), entry("b", [8, 9, 10], 2, (6, 2)))
    assert inputs.token_ids.tolist() == [7, 8, 9, 10]
    assert inputs.positions.tolist() == [5, 2, 3, 4]
    assert inputs.slot_mapping.tolist() == [1 * BLOCK + 1, 6 * BLOCK + 2, 6 * BLOCK + 3, 2 * BLOCK]
    assert inputs.seq_lens.tolist() == [6, 5]
    assert inputs.query_start.tolist() == [0, 1, 4]
    assert inputs.logit_rows.tolist() == [0, 3]
    assert [row[:2] for row in inputs.block_tables.tolist()] == [[3, 1], [6, 2]]


def test_every_row_that_the_plan_wants() -> None:
    scored = PlanEntry("b", (8, 9, 10), 0, (6,), True, 0, 0, 4)
    inputs = fed(buffers(), StepShape(4, 2, 4), entry("a", [7], 5, (3, 1)), scored, every_wanted=True)
    assert inputs.logit_rows.tolist() == [0, 1, 2, 3]


def test_rows_past_the_plan_are_inert() -> None:
    step, shape = buffers(), StepShape(4, 4, 4)
    fed(step, shape, *(entry(name, [5], 9, (1, 2, 3)) for name in "abcd"))
    inputs = fed(step, shape, entry("a", [6], 10, (1, 2, 3)))
    assert inputs.token_ids.tolist() == [6, 0, 0, 0]
    assert inputs.slot_mapping.tolist() == [3 * BLOCK + 2, -1, -1, -1]
    assert inputs.seq_lens.tolist() == [11, 0, 0, 0]
    assert inputs.query_start.tolist() == [0, 1, 1, 1, 1]


def test_what_the_two_steps_in_flight_still_copy_from_is_not_written_over() -> None:
    step, shape = buffers(), StepShape(2, 2, 2)
    hosts = []
    for token in (5, 6, 7):
        hosts.append(step.host(shape))
        step.fill(Plan(1, (entry("a", [token], 9, (1, 2, 3)),), 1), shape, np.zeros(1, np.int64), hosts[-1])
    assert [host.token_ids.tolist() for host in hosts] == [[5, 0], [6, 0], [7, 0]]


def test_a_pending_token_is_read_from_the_slot_of_its_request() -> None:
    inputs = fed(
        buffers(),
        StepShape(2, 2, 2),
        entry("a", [PENDING], 3, (0,)),
        entry("b", [11], 3, (1,)),
        slots={"a": 5},
    )
    take_pending_reference(inputs.token_ids, torch.tensor([0, 0, 0, 0, 0, 42]))
    assert inputs.token_ids.tolist() == [42, 11]


def test_tables_follow_sequences_that_grow_and_change_places() -> None:
    step, shape = buffers(), StepShape(2, 2, 2)
    fed(step, shape, entry("a", [1], 3, (4,)), entry("b", [1], 3, (5,)))
    inputs = fed(step, shape, entry("a", [1], 4, (4, 6)), entry("b", [1], 4, (5, 7)))
    assert inputs.block_tables[:, :2].tolist() == [[4, 6], [5, 7]]
    inputs = fed(step, shape, entry("b", [1], 5, (5, 7)), entry("c", [1], 4, (4, 2)))
    assert inputs.block_tables[:, :2].tolist() == [[5, 7], [4, 2]]


def test_tables_that_did_not_arrive_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, shape = buffers(), StepShape(2, 2, 2)
    entries = entry("a", [1], 7, (4, 6)), entry("b", [1], 7, (5, 7))

    def torn(_: object) -> None:
        raise RuntimeError("torn")

    with monkeypatch.context() as patched:
        patched.setattr(step, "_send_tables", torn)
        with pytest.raises(RuntimeError, match="torn"):
            fed(step, shape, *entries)
    inputs = fed(step, shape, *entries)
    assert inputs.block_tables[:, :2].tolist() == [[4, 6], [5, 7]]
    step.clear_tables(2)  # as before a capture
    assert not step.tables.any()
    inputs = fed(step, shape, *entries)
    assert inputs.block_tables[:, :2].tolist() == [[4, 6], [5, 7]]


def test_views_of_shapes_that_are_one_of_a_kind_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_buffers, "_MOST_SHAPES", 4)
    step = buffers()
    for tokens in range(2, 32):
        inputs = fed(step, StepShape(tokens, 1, 1), entry("a", [7] * tokens, 0, tuple(range(8))))
        assert inputs.token_ids.tolist() == [7] * tokens
        assert len(step._views) <= 4


def test_every_field_of_every_shape_is_aligned_for_the_kernels() -> None:
    step = buffers()
    for shape in (StepShape(1, 1, 1), StepShape(3, 3, 3), StepShape(7, 2, 5), StepShape(32, 8, 8)):
        inputs, samples = step.inputs(shape)
        base = inputs.token_ids.data_ptr()
        fields = [*inputs._replace(block_tables=inputs.token_ids), samples]
        assert all((field.data_ptr() - base) % 16 == 0 for field in fields)
        assert (inputs.token_ids.numel(), inputs.seq_lens.numel(), samples.numel()) == (
            shape.tokens,
            shape.sequences,
            3 * shape.logit_rows,
        )
