"""Capturing: what is replayed equals eager bit by bit, and a full device leaves shapes uncaptured."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.runtime.gpu.step_graphs import StepGraphs, bucket_shapes
from ostinato.runtime.runner import StepShape
from ostinato.runtime.scheduling.plan import Plan, PlanEntry

given_back: list[bool] = []  # once for each shape, whether it could be captured or not
SHAPES = [StepShape(1, 1, 1), StepShape(2, 2, 2), StepShape(4, 4, 4)]


class FakeGraph:
    """Replays what was called while it was captured."""

    def __init__(self) -> None:
        self.is_open = False

    def capture_begin(self, **_: Any) -> None:
        self.is_open = True

    def capture_end(self) -> None:
        assert self.is_open
        self.is_open = False

    def replay(self) -> None:
        """The body has computed its logits already."""


class Stream:
    def synchronize(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[StepShape], Tensor]], StepGraphs]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    given_back.clear()
    free = iter(range(1000, 0, -10))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 1000))
    return lambda body: StepGraphs(body, lambda _: None, list(SHAPES), Stream())  # type: ignore[arg-type]  # fake


def capture_all(graphs: StepGraphs) -> int:
    while graphs.capture_next():
        pass
    return graphs.num_captured


def test_logits_that_are_nan_in_both_runs_are_equal(make: Any) -> None:
    graphs = make(lambda shape: torch.full((shape.logit_rows, 8), torch.nan))
    assert capture_all(graphs) == 3
    assert graphs.bytes == 3 * 10
    assert len(given_back) == 3


def missed(graphs: StepGraphs, sequences: int) -> bool:
    """Whether a pause is wanted when decode steps of so many sequences have run uncaptured 40 times."""
    assert all(graphs.fit(plan(*[1] * sequences)).replay is None for _ in range(40))
    return graphs.wants_pause


def test_a_shape_that_is_missed_often_asks_for_a_pause_and_is_captured_first(make: Any) -> None:
    graphs = make(lambda shape: torch.zeros(shape.logit_rows, 8))
    graphs.capture_next()  # of one token
    pair, four = plan(1, 1), plan(1, 1, 1, 1)
    for _ in range(31):
        graphs.fit(four)
        graphs.fit(pair)
    assert not graphs.wants_pause
    assert graphs.fit(four).replay is None
    assert graphs.wants_pause
    assert graphs.capture_next()
    assert graphs.fit(four).replay is not None
    assert not graphs.wants_pause
    assert graphs.fit(pair).replay is None
    assert graphs.wants_pause, "the other one was missed 32 times, too"
    assert graphs.capture_next()
    assert (graphs.num_captured, graphs.wants_pause) == (3, False)


def test_a_full_device_asks_for_no_pause_again(make: Any) -> None:
    def full(_: StepShape) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = make(full)
    assert missed(graphs, 1)
    assert not graphs.capture_next()
    assert not graphs.wants_pause
    assert not missed(graphs, 1)
    assert not missed(graphs, 2)
    assert not graphs.capture_next()


def test_a_shape_that_differs_from_eager_asks_for_no_pause_again(make: Any) -> None:
    runs = iter(range(100))
    graphs = make(lambda shape: torch.full((shape.logit_rows, 8), float(next(runs) * (shape.tokens == 2))))
    assert missed(graphs, 2)
    assert graphs.capture_next()
    assert not missed(graphs, 2)
    assert missed(graphs, 4)
    graphs.clear()
    assert not graphs.wants_pause, "graphs that are forgotten are not wanted"


def test_a_shape_whose_replay_differs_is_counted_and_not_used(make: Any) -> None:
    runs = iter(range(100))
    graphs = make(lambda shape: torch.full((shape.logit_rows, 8), float(next(runs) * (shape.tokens == 2))))
    assert capture_all(graphs) == 2
    assert dict(graphs.eager) == {"self_check": 1}


def test_a_device_that_is_full_ends_the_captures_and_keeps_those_that_are_made(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[StepShape] = []

    def body(shape: StepShape) -> Tensor:
        calls.append(shape)
        if len(calls) == 4:  # the second shape's capture
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        return torch.zeros(shape.logit_rows, 8)

    graphs = make(body)
    assert capture_all(graphs) == 1
    assert not graphs.capture_next()
    assert "Tried to allocate): it and 1 others run uncaptured" in caplog.text
    assert len(given_back) == 2, "what the failed one left is given back above all"


def test_a_device_that_computes_no_more_is_not_taken_for_a_full_one(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    graphs = make(broken)
    monkeypatch.setattr(Stream, "synchronize", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graphs.capture_next()


def test_an_error_inside_a_capture_is_not_hidden_by_the_end_of_the_capture(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def capture_end(self: FakeGraph) -> None:
        ended.append(self)
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(FakeGraph, "capture_end", capture_end)
    calls = []

    def body(shape: StepShape) -> Tensor:
        calls.append(shape)
        if len(calls) == 2:
            raise ValueError("a shape that no kernel takes")
        return torch.zeros(1, 8)

    with pytest.raises(ValueError, match="no kernel takes"):
        make(body).capture_next()
    assert len(ended) == 1


@pytest.mark.parametrize("most", [1, 2, 3, 100, 256, 300, 4096])
def test_shapes_end_with_the_most_sequences_and_tell_decode_from_mixed_steps(most: int) -> None:
    shapes = bucket_shapes(most, 1024)
    decode = [s for s in shapes if s.tokens == s.sequences]
    assert max(s.tokens for s in decode) == min(most, 256)
    assert all(s.sequences <= most for s in shapes)
    assert len(set(shapes)) == len(shapes)
    assert bucket_shapes(most, 0) == []


def test_the_largest_shape_is_captured_first_then_hot_ones_from_large_to_small() -> None:
    shapes = bucket_shapes(128, 1024)
    assert shapes[0] == StepShape(1024, 128, 128)
    assert [s.tokens for s in shapes[1:12]] == [256, 128, 64, 48, 64, 32, 24, 32, 16, 12, 8]
    rest = [s.tokens for s in shapes if s.tokens > 64 and s.tokens == s.sequences]
    assert rest == [128, 112, 96, 80]
    assert shapes[-1] == StepShape(80, 80, 80)


def plan(*lengths: int, scored: int = 0) -> Plan:
    """A step of so many tokens of each sequence, which samples; `scored`: rows of prompts with logits."""
    entries = [
        PlanEntry(f"r{at}", (7,) * n, 0, (at,), True, n - 1 - min(scored, n - 1), 0, n + 1)
        for at, n in enumerate(lengths)
    ]
    return Plan(1, tuple(entries), sum(lengths))


def test_a_plan_runs_in_the_smallest_shape_that_holds_it_or_is_counted_with_the_reason(make: Any) -> None:
    graphs = make(lambda shape: torch.zeros(shape.logit_rows, 8))
    graphs._mixed = [StepShape(8, 2, 2), StepShape(16, 4, 4)]
    graphs._captured = {shape: shape for shape in [*SHAPES, *graphs._mixed]}
    fits = [graphs.fit(plan(*lengths)) for lengths in ((1,), (1, 1, 1), (3,), (1, 5), (1, 1, 2), (9,))]
    assert [fit.shape for fit in fits] == [
        SHAPES[0],
        SHAPES[2],
        *graphs._mixed[:1] * 2,
        *graphs._mixed[1:] * 2,
    ]
    assert all(fit.replay == fit.shape and not fit.every_wanted for fit in fits)
    assert (graphs.replays, dict(graphs.eager)) == (6, {})
    del graphs._captured[SHAPES[2]]
    assert graphs.fit(plan(1, 1, 1)) == (StepShape(3, 3, 3), None, False)
    assert graphs.fit(plan(17)) == (StepShape(17, 1, 1), None, False)
    assert graphs.fit(plan(1, 1, 1, 1, 1)) == (StepShape(5, 5, 5), None, False)
    assert graphs.fit(plan(1, 4, scored=2)) == (StepShape(5, 2, 4), None, True)
    assert graphs.replays == 6
    assert dict(graphs.eager) == {"not_captured": 1, "too_large": 2, "prompt_logprobs": 1}


def test_hot_shapes_and_the_largest_are_there_before_the_rest(make: Any) -> None:
    graphs = make(lambda shape: torch.zeros(shape.logit_rows, 8))
    graphs._waiting = bucket_shapes(128, 1024)
    graphs.capture_hot()
    assert {s.tokens for s in graphs._captured} == {1024, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256}
    assert {s.tokens for s in graphs._waiting} == {80, 96, 112, 128, 512}


def test_no_garbage_is_collected_while_kernels_are_captured(make: Any) -> None:
    seen: list[bool] = []

    def body(shape: StepShape) -> Tensor:
        seen.append(gc.isenabled())
        return torch.zeros(shape.logit_rows, 8)

    assert capture_all(make(body)) == 3
    assert seen == [True, False] * 3, "eager, then captured"
    assert gc.isenabled()

    def fails(shape: StepShape) -> Tensor:
        if not gc.isenabled():
            raise RuntimeError("no memory")
        return torch.zeros(shape.logit_rows, 8)

    assert capture_all(make(fails)) == 0
    assert gc.isenabled()
