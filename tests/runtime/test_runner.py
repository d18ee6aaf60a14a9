"""Input tensors of a step, checked number by number."""

from pathlib import Path

import pytest
import torch

from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.runner import Runner
from ostinato.runtime.scheduling.plan import Plan, PlanEntry
from tests.support.toy_model import FACTS


class Recorder:
    """Keeps what the runner gives a model; its logits are the wanted rows' numbers."""

    facts = FACTS
    device = torch.device("cpu")
    folder = Path("recorder")

    def __init__(self):
        self.seen = None

    def __call__(self, inputs, kv):
        self.seen = StepInputs(*(tensor.clone() for tensor in inputs))
        return inputs.logit_rows.float()[:, None]


def entry(name, token_ids, start, block_ids, logits_from=None):
    wanted = len(token_ids) - 1 if logits_from is None else logits_from
    return PlanEntry(name, tuple(token_ids), start, block_ids, True, wanted, 0, start + len(token_ids))


def plan(*entries):
    return Plan(1, tuple(entries), sum(len(e.token_ids) for e in entries))


@pytest.fixture
def runner():
    return Runner(Recorder(), [], block_tokens=4)


def as_lists(inputs):
    return {name: tensor.tolist() for name, tensor in inputs._asdict().items()}


def test_decode_and_prefill_in_one_step(runner):
    step = plan(
        entry("a", [50], 6, (3, 9)),  # decode: position 6 is in the second block
        entry("b", [7, 8, 9, 10, 11], 2, (5, 1), logits_from=5),  # middle chunk: no logits
        entry("c", [1, 2, 3], 0, (0,), logits_from=1),  # prompt_logprobs
    )
    got = as_lists(runner.inputs(step))
    tables = got.pop("block_tables")
    assert got == {
        "token_ids": [50, 7, 8, 9, 10, 11, 1, 2, 3],
        "positions": [6, 2, 3, 4, 5, 6, 0, 1, 2],
        "slot_mapping": [9 * 4 + 2, 22, 23, 4, 5, 6, 0, 1, 2],
        "seq_lens": [7, 7, 3],
        "query_start": [0, 1, 6, 9],
        "logit_rows": [0, 7, 8],
    }
    assert [row[:n] for row, n in zip(tables, (2, 2, 1), strict=True)] == [[3, 9], [5, 1], [0]]


def test_types_are_those_of_the_calling_convention(runner):
    inputs = runner.inputs(plan(entry("a", [5], 0, (0,))))
    wide = {"token_ids", "positions", "slot_mapping", "logit_rows"}
    for name, tensor in inputs._asdict().items():
        assert tensor.dtype is (torch.int64 if name in wide else torch.int32), name
        assert tensor.is_contiguous(), name


def test_no_wanted_row_gives_an_empty_list_of_rows(runner):
    inputs = runner.inputs(plan(entry("a", [5, 6], 0, (0,), logits_from=2)))
    assert inputs.logit_rows.shape == (0,)


def test_rows_follow_their_sequences_when_the_batch_changes(runner):
    a, b, c = (1, 2), (3,), (4, 5, 6)
    runner.inputs(plan(entry("a", [0], 5, a), entry("b", [0], 1, b)))
    got = runner.inputs(plan(entry("b", [0], 2, b), entry("c", [0], 9, c))).block_tables.tolist()
    assert got[0][:1] == [3]
    assert got[1][:3] == [4, 5, 6]
    grown = (3, 8)  # the scheduler makes a new tuple when a sequence gets another block
    got = runner.inputs(plan(entry("b", [0], 4, grown), entry("a", [0], 6, a))).block_tables.tolist()
    assert got[0][:2] == [3, 8]
    assert got[1][:2] == [1, 2]


def test_buffers_grow_with_the_step_and_keep_every_number(runner):
    small = plan(entry("s", [9], 0, (7,)))
    runner.inputs(small)
    tokens = list(range(1000))
    entries = [entry(str(i), tokens, 0, tuple(range(i, i + 250))) for i in range(9)]
    inputs = runner.inputs(plan(*entries))
    assert inputs.token_ids.tolist() == tokens * 9
    assert inputs.block_tables[8, :250].tolist() == list(range(8, 258))
    assert inputs.slot_mapping[-1].item() == 257 * 4 + 3
    assert runner.inputs(small).slot_mapping.tolist() == [28]


def test_planes_can_be_printed_though_most_of_them_has_no_memory():
    seen = []

    class Model(Recorder):
        def __call__(self, inputs, kv):
            seen.extend(kv)
            kv[0][0] = 1.0
            return kv[0][0].sum()[None]

    plane = torch.zeros(3, 4, 2, 5)
    total = Runner(Model(), [plane], block_tokens=4).run(plan(entry("a", [5], 0, (0,))))
    assert repr(seen[0]) == str(seen[0]) == f"{seen[0]}" == "KVPlane([3, 4, 2, 5], torch.float32, cpu)"
    assert type(total) is torch.Tensor
    assert plane.sum() == 40 == total


def test_run_hands_the_model_the_inputs_without_autograd(runner):
    logits = runner.run(plan(entry("a", [5, 6], 0, (0,)), entry("b", [7], 3, (1,))))
    assert logits.tolist() == [[1.0], [2.0]]
    assert logits.is_inference()
