"""Requests that wait for their grammar: case B01 (C), B11 (parked); and how they overlap."""

import random

import pytest

from ostinato.errors import Overloaded
from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.scheduling.block_pool import BlockPool
from ostinato.runtime.scheduling.plan import PENDING
from ostinato.runtime.scheduling.scheduler import Scheduler

TOKEN = 7


def scheduler(*, blocks: int = 1000, max_in_flight: int = 1, **config: int) -> Scheduler:
    pool = BlockPool(blocks, blocks, 16, True)
    settings = SchedulerConfig(**{"max_step_tokens": 64, **config})
    return Scheduler(pool, settings, 16000, frozenset({1}), max_in_flight=max_in_flight)


def request(name: str, prompt: int, max_tokens: int = 50) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(range(10, 10 + prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def step(it: Scheduler) -> list[str]:
    """One step; the requests that got a token."""
    plan = it.next_plan()
    assert plan is not None
    assert plan.num_tokens <= it.config.max_step_tokens
    outcomes = it.complete(plan, {e.request_id: TOKEN for e in plan.entries if e.samples})
    it.check()
    return [outcome.request_id for outcome in outcomes]


def test_a_parked_request_is_promoted_under_load_and_keeps_its_rank():
    it = scheduler()
    it.add(request("A", 10_000))
    it.add(request("C", 20), parked=True)
    it.add(request("B", 8))
    heard = [step(it) for _ in range(4)]
    assert "B" in heard[0]  # nobody waits for the parked one
    assert all("C" not in names for names in heard)
    assert (it.num_waiting, it.num_running) == (1, 2)
    it.unpark("C")
    it.add(request("late", 20))
    heard = [step(it) for _ in range(3)]
    assert "C" in heard[0]  # 20 tokens of the 31 that go to short prompts
    assert all("B" in names for names in heard)
    assert next(at for at, names in enumerate(heard) if "C" in names) <= next(
        at for at, names in enumerate([*heard, ["late"]]) if "late" in names
    )


def test_with_nothing_but_parked_requests_there_is_no_plan_and_nobody_is_failed():
    it = scheduler(blocks=2)
    it.add(request("C", 20), parked=True)
    assert it.next_plan() is None
    assert it.take_ended() == []
    assert it.has_work
    it.unpark("C")
    assert step(it) == ["C"]


def test_parked_requests_can_be_aborted_and_their_ids_used_again():
    it = scheduler()
    it.add(request("C", 20), parked=True)
    assert it.abort("C")
    assert not it.abort("C")
    assert not it.has_work
    it.check()
    it.add(request("C", 20))
    assert step(it) == ["C"]


def test_parked_requests_count_as_waiting():
    it = scheduler(max_waiting=2, max_running=1)
    for name in "abc":
        it.add(request(name, 5), parked=True)
    with pytest.raises(Overloaded, match="3 requests wait"):
        it.add(request("d", 5))


def test_a_finished_answer_ends_with_stop_also_at_its_last_token():
    it = scheduler()
    it.add(request("C", 5, max_tokens=1), parked=True)
    it.unpark("C")
    plan = it.next_plan()
    assert plan is not None
    (outcome,) = it.complete(plan, {"C": TOKEN}, finished={"C"})
    assert (outcome.finish_reason, outcome.stop_token_id) == ("stop", None)
    assert not it.has_work


def test_a_request_with_a_grammar_is_never_fed_a_token_that_is_not_known_while_others_are():
    it = scheduler(max_in_flight=2)
    it.add(request("free", 5))
    it.add(request("bound", 5), parked=True)
    it.unpark("bound")
    pending = {"free": 0, "bound": 0}
    sampled = {"free": 0, "bound": 0}
    flying: list[object] = []
    for _ in range(40):
        plan = it.next_plan()
        if plan is not None:
            flying.append(plan)
            for entry in plan.entries:
                pending[entry.request_id] += PENDING in entry.token_ids
                sampled[entry.request_id] += entry.samples
        if plan is None or len(flying) == 2:
            oldest = flying.pop(0)
            it.complete(oldest, {e.request_id: TOKEN for e in oldest.entries if e.samples})  # type: ignore[attr-defined]
        it.check()
    assert pending == {"free": pending["free"], "bound": 0}
    assert pending["free"] > 30
    assert sampled["bound"] in range(sampled["free"] // 2 - 1, sampled["free"] // 2 + 3)


def test_a_thousand_random_operations_keep_the_books():
    rng = random.Random(4)
    it = scheduler(blocks=40, max_in_flight=2, max_running=6, max_waiting=50)
    live: dict[str, bool] = {}
    flying: list[object] = []
    for turn in range(1000):
        kind = rng.random()
        if kind < 0.25 and len(live) < 20:
            name = f"r{turn}"
            live[name] = rng.random() < 0.5
            it.add(request(name, rng.randrange(1, 90), rng.randrange(1, 30)), parked=live[name])
        elif kind < 0.35 and live:
            name = rng.choice([*live])
            del live[name]
            it.abort(name)
        elif kind < 0.5 and any(live.values()):
            name = rng.choice([name for name, parked in live.items() if parked])
            live[name] = False
            it.unpark(name)
        elif flying and (len(flying) == 2 or kind < 0.7):
            plan = flying.pop(0)
            names = [e.request_id for e in plan.entries if e.samples]  # type: ignore[attr-defined]
            done = {name for name in names if rng.random() < 0.05}
            for outcome in it.complete(plan, dict.fromkeys(names, TOKEN), finished=done):  # type: ignore[arg-type]
                if outcome.finish_reason is not None:
                    live.pop(outcome.request_id, None)
        elif (plan := it.next_plan()) is not None:
            flying.append(plan)
        for outcome in it.take_ended():
            live.pop(outcome.request_id, None)
        it.check()
