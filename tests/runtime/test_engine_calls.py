"""Calls of an operator: the prefix cache is forgotten, requests end with their blocks, KV memory is cut."""

import time

import pytest

from ostinato.runtime import kv_memory
from ostinato.runtime.config import KVConfig
from ostinato.runtime.frames import Message
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.messages import CallDone, EndRequests, KVTarget, ResetPrefixCache
from tests.support.engine_runs import (
    BLOCK_BYTES,
    events_of,
    finish,
    generate,
    greedy,
    prompt_of,
    tokens_of,
    toy_engine,
)
from tests.support.toy_model import ToyModel

TOY = ToyModel()
PROMPT = prompt_of(40)


def call(engine, message, news=None):
    engine.inbox.put(message)
    said = engine.step()
    (done,) = [one for one in said if isinstance(one, CallDone)]
    if news is not None:
        news += said
    return done


def cached(engine, name, prompt=PROMPT):
    engine.inbox.put(greedy(name, prompt, 2))
    return events_of(finish(engine), name)[0].cached_tokens


def test_no_request_finds_a_prefix_that_was_computed_before_a_reset():
    with toy_engine() as engine:
        assert [cached(engine, "a"), cached(engine, "b")] == [0, 32]
        done = call(engine, ResetPrefixCache(call_id=1))
        assert (done.count, engine.stats().blocks_cached) == (2, 0)
        engine.check()
        assert [cached(engine, "c"), cached(engine, "d")] == [0, 32]
        assert call(engine, ResetPrefixCache(call_id=2)).count == 2
        assert call(engine, ResetPrefixCache(call_id=3)).count == 0


def test_a_running_request_keeps_its_blocks_through_a_reset_and_its_answer_does_not_change():
    with toy_engine() as engine:
        engine.inbox.put(greedy("long", PROMPT, 60))
        news = engine.step() + engine.step()
        assert call(engine, ResetPrefixCache(call_id=1), news).count == 2
        engine.check()
        assert engine.stats().blocks_used == 3
        engine.inbox.put(greedy("same", PROMPT, 2))
        news += finish(engine)
        assert events_of(news, "same")[0].cached_tokens == 0
        assert tokens_of(news, "long") == TOY.greedy(PROMPT, 60)
        engine.check()
        # what `same` computed and published is found again
        assert cached(engine, "again") == 32


def test_ended_requests_have_one_end_and_their_blocks_are_back_with_the_answer():
    with toy_engine() as engine:
        engine.inbox.put(*(greedy(name, prompt_of(30, at), 50) for at, name in enumerate("abc")))
        news = engine.step() + engine.step()
        assert call(engine, EndRequests(call_id=1, request_ids=("a", "a", "unknown")), news).count == 1
        assert engine.stats().running == 2
        late = greedy("late", [5], 50)
        engine.inbox.put(late)
        assert call(engine, EndRequests(call_id=2), news).count == 3
        assert (engine.stats().blocks_used, engine.has_work) == (0, False)
        engine.check()
        for name in ("a", "b", "c", "late"):
            reasons = [event.finish_reason for event in events_of(news, name) if event.finish_reason]
            assert reasons == ["abort"]
        assert call(engine, EndRequests(call_id=3)).count == 0
        assert generate(engine, greedy("next", PROMPT)) == {"next": TOY.greedy(PROMPT, 8)}


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_answer_to_a_target_tells_what_is_held_from_then_on(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
):
    mib = 1 << 20
    kv = KVConfig(initial_mib=48, max_gib=0.0625, headroom_gib=0)  # it goes back in steps of 16 MiB
    order: list[str] = []
    shrink = KVPool.shrink

    def slow_shrink(pool: KVPool, blocks: int) -> None:
        time.sleep(0.05)  # of the thread that gives memory back: an answer that does not wait comes first
        shrink(pool, blocks)

    monkeypatch.setattr(KVPool, "shrink", slow_shrink)
    # as on a GPU
    monkeypatch.setattr(kv_memory, "KVWorker", lambda pool, **_: KVWorker(pool, is_threaded=True))
    with toy_engine(kv=kv) as engine:
        settle, move = engine._calls._settle, engine._calls._move
        monkeypatch.setattr(engine._calls, "_settle", lambda: order.append("settle") or settle())
        monkeypatch.setattr(engine._calls, "_move", lambda moves: order.append("move") or move(moves))
        news: list[Message] = []
        if is_busy:  # the last one holds blocks behind the first 20
            engine.inbox.put(*(greedy(f"short-{at}", prompt_of(40, at), 1) for at in range(12)))
            engine.inbox.put(greedy("long", PROMPT, 60))
            news += engine.step() + engine.step()
        assert engine.stats().kv_bytes_committed == 48 * mib
        state = call(engine, KVTarget(call_id=1, target_bytes=20 * BLOCK_BYTES), news).state
        assert state is not None
        assert (state.kv_bytes, state.kv_target_bytes) == (16 * mib, 20 * BLOCK_BYTES)
        assert order == (["settle", "move"] if is_busy else ["settle"])
        assert engine.stats().blocks_committed == 20
        news += finish(engine)
        assert engine.stats().kv_bytes_committed == 16 * mib
        if is_busy:
            assert tokens_of(news, "long") == TOY.greedy(PROMPT, 60)
        engine.check()
