"""Graphs that take turns: how often each is replayed, and what a sample says."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.runtime.gpu import graph_race
from ostinato.runtime.gpu.graph_race import captured, race


class Clock:
    """A GPU on which a replay takes what its graph says, in ms."""

    now = 0.0


class Graph:
    def __init__(self, ms: float, log: list[float]) -> None:
        self.ms, self.log = ms, log

    def replay(self) -> None:
        Clock.now += self.ms
        self.log.append(self.ms)


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return []


def test_graphs_take_turns_and_the_first_turn_does_not_count(log: list[float]) -> None:
    graphs: Any = [Graph(1.0, log), Graph(2.0, log)]
    took = race(graphs, 4_000_000_000, 3, 2.0)  # 1 ms of an H200's reading, so two replays a sample
    assert took == [pytest.approx([1.0] * 3), pytest.approx([2.0] * 3)]
    assert log == [1.0, 1.0, 2.0, 2.0] * 4


def test_without_bytes_a_replay_says_how_often(log: list[float]) -> None:
    graphs: Any = [Graph(0.5, log), Graph(0.25, log)]
    race(graphs, None, 1, 2.0)
    assert log == [0.5] + ([0.5] * 4 + [0.25] * 4) * 2
    log.clear()
    slow: Any = [Graph(50.0, log)]
    race(slow, None, 2, 1.0)
    assert log == [50.0] * 4
    assert race([], None, 7) == []


class Gpu:
    """A GPU that notes what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.log = 0, list[Any]()
        graph = SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.log.append(("begin", pool)),
            capture_end=self._end,
        )
        fakes: dict[str, Any] = {
            "current_device": lambda: self.device,
            "current_stream": lambda: "steps",
            "Stream": lambda device: SimpleNamespace(device=device, wait_stream=self._wait),
            "CUDAGraph": lambda: graph,
            "stream": lambda stream: self.log.append(stream.device) or nullcontext(),
            "synchronize": lambda: self.log.append("wait"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        graph_race._capture_stream.cache_clear()

    def _wait(self, stream: str) -> None:
        self.log.append(stream)

    def _end(self) -> None:
        self.log.append("end")
        if "fail" in self.log:
            raise RuntimeError("capture was invalidated")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Gpu(monkeypatch)
    graph_race._capture_stream.cache_clear()


def test_a_graph_is_captured_behind_a_run_on_a_stream_of_its_gpu(gpu: Gpu) -> None:
    for gpu.device in (0, 1):
        gpu.log.clear()
        captured(lambda: gpu.log.append("call"), "pool")
        assert gpu.log == ["steps", gpu.device, "call", "wait", ("begin", "pool"), "call", "end"]
    assert graph_race._capture_stream(1) is graph_race._capture_stream(1), "each has a workspace"


def test_a_call_that_fails_in_a_capture_ends_it_and_says_why(gpu: Gpu) -> None:
    def call() -> None:
        if ("begin", None) in gpu.log:
            gpu.log.append("fail")
            raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        captured(call)
    assert gpu.log[-1] == "end"
