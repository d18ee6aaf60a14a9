"""Cancelling at any time: one end for each request, all blocks back, other requests untouched."""

import random

from ostinato.runtime.config import KVConfig, SchedulerConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.memory.vmm import VmmOutOfMemory
from ostinato.runtime.memory.vmm_host import HostVmm
from ostinato.runtime.messages import Abort
from tests.support.engine_runs import (
    events_of,
    finish,
    generate,
    greedy,
    prompt_of,
    tokens_of,
    toy_config,
    toy_engine,
)
from tests.support.faulty_driver import FaultyDriver
from tests.support.toy_model import ToyModel

TOY = ToyModel()


def test_abort_in_every_state_gives_one_end_and_all_blocks_back():
    config = toy_config(scheduler=SchedulerConfig(max_running=2, max_step_tokens=16))
    with Engine(ToyModel(), config) as engine:
        engine.inbox.put(Abort(request_ids=("unknown",)))
        assert finish(engine) == []
        engine.inbox.put(greedy("early", [5]), Abort(request_ids=("early", "early")))  # never planned
        assert [e.finish_reason for e in events_of(finish(engine), "early")] == ["abort"]
        engine.inbox.put(greedy("decode", [5], 99), greedy("chunks", prompt_of(99)), greedy("queued", [9]))
        news = engine.step() + engine.step()  # `chunks` is between two prefill chunks
        engine.inbox.put(Abort(request_ids=("queued", "chunks", "decode", "unknown")))
        news += finish(engine)
        for name in ("decode", "chunks", "queued"):
            assert [e.finish_reason for e in events_of(news, name) if e.finish_reason] == ["abort"]
        engine.inbox.put(Abort(request_ids=("decode",)))  # ended long ago
        assert finish(engine) == []
        assert engine.stats().blocks_used == 0
        engine.check()
        # what the aborted request left in the prefix cache is whole blocks with right content
        assert generate(engine, greedy("again", prompt_of(99)))["again"] == TOY.greedy(prompt_of(99), 8)


def test_a_preempted_request_is_aborted_once_and_the_others_go_on():
    with toy_engine(blocks=8) as engine:
        engine.inbox.put(*(greedy(f"r{at}", prompt_of(30, at), 60) for at in range(3)))
        news = []
        while not engine.stats().preemptions:
            news += engine.step()
        assert engine.stats().waiting == 1
        engine.inbox.put(Abort(request_ids=("r2",)))  # the last in rank is the one that was struck
        news += finish(engine)
        ends = [[e.finish_reason for e in events_of(news, f"r{at}") if e.finish_reason] for at in range(3)]
        assert ends == [["length"], ["length"], ["abort"]]
        for at in range(2):
            assert tokens_of(news, f"r{at}") == TOY.greedy(prompt_of(30, at), 60)
        assert engine.stats().blocks_used == 0
        engine.check()


def test_a_request_that_waits_for_memory_to_grow_is_aborted_and_the_memory_serves_the_next(monkeypatch):
    driver = FaultyDriver(HostVmm())
    monkeypatch.setattr("ostinato.runtime.kv_memory.usable_driver", lambda _: driver)
    kv = KVConfig(initial_mib=1, max_gib=0.02, headroom_gib=0, wait_s=60)
    with Engine(ToyModel(), toy_config(kv=kv)) as engine:
        held = engine._blocks.allocate(engine._blocks.num_free)
        driver.arm(1, keeps_failing=True, error=VmmOutOfMemory)
        engine.inbox.put(greedy("stuck", prompt_of(40)), greedy("behind", prompt_of(40)))
        assert [events_of(engine.step(), "stuck") for _ in range(3)] == [[]] * 3
        engine.inbox.put(Abort(request_ids=("stuck",)))
        assert [e.finish_reason for e in events_of(engine.step(), "stuck")] == ["abort"]
        engine._blocks.free(held)
        driver.heal()
        assert tokens_of(finish(engine), "behind") == TOY.greedy(prompt_of(40), 8)
        assert engine.stats().blocks_used == 0
        engine.check()


def test_an_id_can_be_used_again_right_after_its_abort():
    with toy_engine() as engine:
        engine.inbox.put(greedy("a", [5, 6], 50))
        engine.step()
        engine.inbox.put(Abort(request_ids=("a",)), greedy("a", [7, 8], 3))
        events = events_of(finish(engine), "a")
        assert events[0].finish_reason == "abort"
        assert [t for e in events[1:] for t in e.token_ids] == TOY.greedy([7, 8], 3)


def test_a_thousand_random_aborts_leave_the_books_balanced_and_others_alone():
    draw = random.Random(7)
    prompts = {n: prompt_of(n, n) for n in (1, 5, 16, 17, 40, 90)}
    truth = {n: TOY.greedy(prompt, 12) for n, prompt in prompts.items()}
    sent, ended, aborts = {}, {}, 0
    config = toy_config(blocks=24, scheduler=SchedulerConfig(max_running=8, max_step_tokens=64))
    with Engine(ToyModel(), config) as engine:
        start = engine.stats()
        while aborts < 1000:
            for _ in range(draw.randrange(5)):
                name, n = f"r{len(sent)}", draw.choice(list(prompts))
                sent[name] = (n, draw.randrange(1, 13))
                engine.inbox.put(greedy(name, prompts[n], sent[name][1]))
            if sent and draw.random() < 0.8:
                recent = [
                    f"r{draw.randrange(max(0, len(sent) - 12), len(sent))}"
                    for _ in range(draw.randrange(1, 6))
                ]
                engine.inbox.put(Abort(request_ids=tuple(recent)))
                aborts += len(recent)
            for message in engine.step():
                for event in message.events:
                    assert event.request_id not in ended, "news after the end"
                    tokens = sent[event.request_id] + event.token_ids
                    sent[event.request_id] = tokens
                    if event.finish_reason:
                        ended[event.request_id] = event.finish_reason
            if aborts % 50 == 0:
                engine.check()
        for message in finish(engine):
            for event in message.events:
                sent[event.request_id] += event.token_ids
                if event.finish_reason:
                    ended[event.request_id] = event.finish_reason
        engine.check()
        end = engine.stats()
        blocks = engine._blocks
        assert (blocks.num_held, blocks.num_free + blocks.num_cached) == (0, blocks.committed)
        assert (end.running, end.waiting, end.blocks_used) == (0, 0, 0)
        assert end.blocks_committed == start.blocks_committed
        assert end.kv_bytes_committed == start.kv_bytes_committed
    assert ended.keys() == sent.keys()
    assert set(ended.values()) == {"abort", "length"}
    for name, (n, wanted, *tokens) in sent.items():
        assert tokens == truth[n][: len(tokens)], name
        assert len(tokens) == wanted if ended[name] == "length" else len(tokens) < wanted
