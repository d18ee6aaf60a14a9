"""Pauses that a back end asks for: the engine lets steps run out, does what waits, and loses no token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.runtime.engine import Engine
from ostinato.runtime.messages import CallDone, Sleep, Wake
from ostinato.runtime.runner import StepShape
from ostinato.runtime.scheduling.plan import Plan
from tests.support.engine_runs import BLOCK_BYTES, finish, generate, tokens_of
from tests.support.grammar_runs import LateBackend, LateEngine, asked, grammar_engine
from tests.support.no_gpu import TOKEN, HostEngine, NoGpuBackend, NoModel, config, request


class PausingBackend(LateBackend):
    """Wants a pause after every fifth step, as a shape does that was missed often."""

    wants_pause = False

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        assert not self.wants_pause, "a step in the way of a pause"
        step = super().launch(*args, **kwargs)
        self.wants_pause = len(self.plans) % 5 == 0
        return step


class PausingEngine(LateEngine):
    pauses: list[int]  # steps in flight at each

    def _make_backend(self, *args: Any) -> Any:
        self.pauses = []
        backend = super()._make_backend(*args)
        backend.__class__ = PausingBackend

        def idle() -> bool:
            assert self._sizer._memory._using.locked(), "KV memory may change"
            self.pauses.append(len(self._in_flight))
            backend.wants_pause = False
            return True

        backend.idle = idle
        return backend


def test_a_pause_comes_when_nothing_is_in_flight_and_costs_no_token(tmp_path: Path) -> None:
    requests = [asked(name, 23) for name in ("a", "bb", "ccc")]
    with grammar_engine(tmp_path / "plain", LateEngine) as engine:
        wanted = generate(engine, *requests)
    with grammar_engine(tmp_path / "pausing", PausingEngine) as engine:
        assert isinstance(engine, PausingEngine)
        assert generate(engine, *requests) == wanted
        assert engine.pauses == [0] * (len(engine.late.plans) // 5)
        assert len(engine.pauses) >= 4
        engine.check()


@pytest.mark.parametrize("has_pause", [False, True])
def test_memory_is_cut_while_requests_run_in_the_same_turn_as_a_pause(
    tmp_path: Path, has_pause: bool
) -> None:
    request = asked("a", 23)
    with grammar_engine(tmp_path / "plain", LateEngine) as engine:
        wanted = generate(engine, request)
    with grammar_engine(tmp_path / "cut", PausingEngine) as engine:
        assert isinstance(engine, PausingEngine)
        engine.inbox.put(request)
        news = engine.step() + engine.step()
        assert engine.stats().blocks_committed > 20
        engine.late.wants_pause = has_pause
        engine._sizer.set_target(20 * BLOCK_BYTES)  # as idle memory goes back, or to other engines
        turns, in_flight = 0, len(engine._in_flight)
        while engine.stats().blocks_committed > 20 or len(engine.pauses) < has_pause:
            assert len(engine.late.plans) == 2, "a step before the cut"
            assert turns < 9
            news += engine.step()
            turns += 1
        assert (engine.stats().blocks_committed, engine.pauses) == (20, [0] * has_pause)
        assert turns == in_flight + 1, "cut and pause share a turn"
        assert len(engine.late.plans) == 3, "which goes on with a step"
        news += finish(engine)
        assert tokens_of(news, "a") == wanted["a"]
        engine.check()


def test_an_engine_that_sleeps_makes_no_pause(tmp_path: Path) -> None:
    def call(engine: Engine, message: Any) -> None:
        engine.inbox.put(message)
        (done,) = [news for news in engine.step() if isinstance(news, CallDone)]
        assert not done.error

    with grammar_engine(tmp_path / "asleep", PausingEngine) as engine:
        assert isinstance(engine, PausingEngine)
        call(engine, Sleep(call_id=1, level=1))
        engine.late.wants_pause = True
        engine.step()
        assert engine.pauses == []
        call(engine, Wake(call_id=2))
        engine.step()
        assert engine.pauses == [0]


def test_a_gpu_captures_what_it_missed_32_times_and_its_requests_keep_their_block_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, plans = StepShape(2, 2, 2), list[Plan]()
    with HostEngine(NoModel(), config()) as engine:
        backend = engine._backend
        assert isinstance(backend, NoGpuBackend)
        graphs, launch = backend._graphs, backend.launch

        def capture(shape: StepShape) -> Any:
            assert not engine._in_flight
            graphs._prepare(shape)  # writes over buffers and tables of the two requests
            return backend._replay(shape)

        def launched(plan: Plan, *limits: Any) -> Any:
            plans.append(plan)
            return launch(plan, *limits)

        del graphs._captured[pair]
        graphs._waiting.append(pair)
        monkeypatch.setattr(graphs, "_capture", capture)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(backend, "launch", launched)
        requests = [request(name, 60, prompt=200) for name in ("a", "b")]
        assert generate(engine, *requests) == {"a": [TOKEN] * 60, "b": [TOKEN] * 60}
        assert dict(graphs.eager) == {"not_captured": 32}
        (last,) = [plan for plan in plans if plan.step == max(one.step for one in plans)]
        for row, entry in enumerate(last.entries):
            held = backend._buffers.tables[row, : len(entry.block_ids)].tolist()
            assert held == list(entry.block_ids)
            assert any(held)
