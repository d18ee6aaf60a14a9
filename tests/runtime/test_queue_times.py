"""Waiting ends with the first plan, and nothing is kept of requests that are over."""

from types import SimpleNamespace

from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import Abort
from ostinato.runtime.queue_times import QueueTimes
from tests.support.engine_runs import events_of, finish, greedy, prompt_of, toy_engine


def test_waiting_ends_with_the_first_plan_and_is_told_once():
    now = [10.0]
    times = QueueTimes(lambda: now[0])
    for name in ("a", "b", "c"):
        times.arrived(name)
    now[0] = 12.5
    plan = SimpleNamespace(entries=[SimpleNamespace(request_id="a"), SimpleNamespace(request_id="old")])
    times.planned(plan)
    now[0] = 20.0
    times.planned(plan)
    assert [times.take(name) for name in ("a", "a", "b", "unknown")] == [2.5, 0.0, 0.0, 0.0]
    times.take("c")
    assert (times._arrivals, times._waited) == ({}, {})


def test_an_engine_tells_it_with_the_first_token_and_keeps_nothing():
    engine = toy_engine(scheduler=SchedulerConfig(max_running=1))
    for name in ("first", "second", "aborted"):
        engine.inbox.put(greedy(name, prompt_of(9)))
    engine.inbox.put(Abort(request_ids=("aborted",)))
    engine.inbox.put(greedy("refused", prompt_of(100_000)))
    news = finish(engine)
    first, second = ([event.queued_s for event in events_of(news, name)] for name in ("first", "second"))
    assert 0 <= first[0] < second[0]  # one runs at a time
    assert not any(first[1:] + second[1:])
    assert (engine._queue_times._arrivals, engine._queue_times._waited) == ({}, {})
