"""Graphs that take turns: how often each is replayed, and what a sample says."""

from typing import Any

import pytest
import torch

from ostinato.runtime.gpu import graph_race
from ostinato.runtime.gpu.graph_race import race


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


def test_each_gpu_captures_on_a_stream_of_its_own_which_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    graph_race._capture_stream.cache_clear()
    first, again, other = (graph_race._capture_stream(device) for device in (0, 0, 1))
    graph_race._capture_stream.cache_clear()
    assert first is again
    assert first is not other
    assert made == [0, 1]
