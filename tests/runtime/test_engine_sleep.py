"""Sleep and waking: the same answers before and after, no step meanwhile, all or nothing.

The toy's weights are really destroyed while it sleeps: a step that ran then would say NaN.
"""

import asyncio

import pytest

from ostinato.errors import ArtifactError, EngineDead, InvalidRequest, SleepRefused
from ostinato.runtime.config import KVConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import VmmOutOfMemory
from ostinato.runtime.messages import Abort, CallDone, EngineStats, KVTarget, Sleep, Wake
from tests.support.engine_runs import (
    BLOCK_BYTES,
    events_of,
    finish,
    generate,
    greedy,
    prompt_of,
    tokens_of,
    toy_config,
    toy_engine,
)
from tests.support.toy_model import ToyModel, load_toy

TOY = ToyModel()
PROMPT = prompt_of(40)
TRUTH = TOY.greedy(PROMPT, 8)


class LostWeights:
    """Weights of a toy that are NaN while asleep. `fails` is raised by the next call."""

    def __init__(self, model):
        self._tensors = [model._embed, model._head, *(w for layer in model._layers for w in layer.values())]
        self._kept = [tensor.clone() for tensor in self._tensors]
        self.levels, self.fails = [], None

    @property
    def resident_bytes(self):
        return 0 if self._tensors[1].isnan().all() else 1000

    def _raise(self):
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails

    def sleep(self, level):
        self._raise()
        self.levels.append(level)
        for tensor in self._tensors:
            tensor.fill_(float("nan"))

    def wake(self):
        self._raise()
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)


@pytest.fixture
def engine():
    model = ToyModel()
    model.weights = LostWeights(model)
    with Engine(model, toy_config()) as made:
        made.weights = model.weights
        yield made


def call(engine, message, others=None):
    """The answer to a call; what else that step said goes to `others`."""
    engine.inbox.put(message)
    said = engine.step()
    (done,) = [news for news in said if isinstance(news, CallDone)]
    if others is not None:
        others += said
    assert done.call_id == message.call_id
    return done


def sleep(engine, level=1, others=None):
    return call(engine, Sleep(call_id=7, level=level), others)


def wake(engine, others=None):
    return call(engine, Wake(call_id=8), others)


@pytest.mark.parametrize("level", [1, 2])
def test_the_answer_is_the_same_after_each_of_five_sleeps_and_prefixes_are_forgotten(engine, level):
    start = engine.stats()
    for turn in range(5):
        assert generate(engine, greedy("a", PROMPT)) == {"a": TRUTH}
        engine.inbox.put(greedy("b", PROMPT))
        assert events_of(finish(engine), "b")[0].cached_tokens == 32
        state = sleep(engine, level).state
        assert (state.asleep, state.weights_bytes, state.kv_bytes) == (level, 0, 0)
        engine.check()
        assert (engine.stats().asleep, engine.stats().blocks_committed) == (level, 0)
        state = wake(engine).state
        assert (state.asleep, state.weights_bytes) == (0, 1000)
        assert state.kv_bytes == start.kv_bytes_committed
        engine.inbox.put(greedy(f"c{turn}", PROMPT))
        news = finish(engine)
        assert events_of(news, f"c{turn}")[0].cached_tokens == 0
        assert tokens_of(news, f"c{turn}") == TRUTH
        engine.check()


def test_running_requests_are_set_back_and_new_ones_wait_and_all_are_answered_after_waking(engine):
    long = greedy("long", prompt_of(70), 24)
    engine.inbox.put(long, greedy("short", PROMPT))
    news = engine.step() + engine.step() + engine.step()
    steps = engine.stats().steps
    assert sleep(engine).state.kv_bytes == 0
    engine.inbox.put(greedy("late", PROMPT), greedy("leaves", PROMPT))
    news += engine.step()
    engine.inbox.put(Abort(request_ids=("leaves",)))
    news += engine.step() + engine.step()
    assert [event.finish_reason for event in events_of(news, "leaves")] == ["abort"]
    stats = engine.stats()
    assert (stats.steps, stats.running, stats.waiting, stats.preemptions) == (steps, 0, 3, 2)
    engine.check()
    wake(engine, news)
    news += finish(engine)
    assert tokens_of(news, "long") == TOY.greedy(long.prompt_token_ids, 24)
    assert tokens_of(news, "short") == tokens_of(news, "late") == TRUTH
    assert engine.stats().blocks_used == 0


def test_registered_memory_refuses_sleep_before_anything_is_touched(engine):
    engine.inbox.put(greedy("runs", PROMPT, 24))
    news = engine.step()
    before = engine.stats()
    engine._memory.register("offload")
    done = sleep(engine, others=news)
    assert (done.state, done.kind) == (None, "SleepRefused")
    assert "offload has registered KV memory" in done.error
    after = engine.stats()
    assert (after.running, after.preemptions, after.asleep) == (1, 0, 0)
    assert after.kv_bytes_committed >= before.kv_bytes_committed
    assert engine.weights.levels == []
    engine._memory.unregister("offload")
    news += finish(engine)
    assert tokens_of(news, "runs") == TOY.greedy(PROMPT, 24)
    assert sleep(engine).state.asleep == 1


def test_weights_that_cannot_be_given_back_leave_the_engine_awake(engine):
    engine.weights.fails = ArtifactError("no room for a copy")
    done = sleep(engine)
    assert (done.kind, done.error) == ("SleepRefused", "no room for a copy")
    assert engine.stats().asleep == 0
    assert generate(engine, greedy("a", PROMPT)) == {"a": TRUTH}


@pytest.mark.parametrize("wrong", ["kv", "weights"])
def test_waking_that_fails_leaves_it_asleep_with_nothing_held_and_can_be_tried_again(
    engine, monkeypatch, wrong
):
    sleep(engine, 2)
    engine.inbox.put(greedy("waits", PROMPT))
    with monkeypatch.context() as patch:
        if wrong == "kv":
            patch.setattr(KVPool, "recommit", _full)
        else:
            engine.weights.fails = ArtifactError("another file")
        done = wake(engine)
    assert (done.state, done.kind) == (None, "WakeFailed")
    assert ("the device is full" if wrong == "kv" else "another file") in done.error
    stats = engine.stats()
    assert (stats.asleep, stats.kv_bytes_committed, stats.waiting, stats.steps) == (2, 0, 1, 0)
    engine.check()
    news = []
    assert wake(engine, news).state.asleep == 0
    assert tokens_of(news + finish(engine), "waits") == TRUTH


def _full(pool):
    raise VmmOutOfMemory("the device is full")


def test_a_second_call_does_nothing_deeper_is_allowed_and_lighter_is_refused(engine):
    assert wake(engine).state.asleep == 0  # was awake
    assert sleep(engine, 1).state.asleep == 1
    assert sleep(engine, 1).state.asleep == 1
    assert sleep(engine, 2).state.asleep == 2
    assert sleep(engine, 1).kind == "SleepRefused"
    assert engine.weights.levels == [1, 2]
    wake(engine)
    assert generate(engine, greedy("a", PROMPT)) == {"a": TRUTH}


def test_a_target_given_asleep_holds_after_waking(engine):
    generate(engine, *(greedy(f"r{i}", prompt_of(300, i), 2) for i in range(12)))
    sleep(engine)
    done = call(engine, KVTarget(call_id=1, target_bytes=20 * BLOCK_BYTES))
    assert (done.state.kv_target_bytes, done.state.kv_bytes) == (20 * BLOCK_BYTES, 0)
    wake(engine)
    assert generate(engine, greedy("a", PROMPT)) == {"a": TRUTH}
    assert engine.stats().blocks_committed == 20


def test_a_serving_engine_rests_while_requests_wait_for_its_waking():
    class Outlet:
        def __init__(self):
            self.sent, self.rests = [], 0

        def send(self, messages):
            self.sent.extend(messages)

        def idle(self):  # once per rest: asleep with a request waiting, and at the end
            self.rests += 1
            stats = [message for message in self.sent if isinstance(message, EngineStats)]
            if self.rests == 1:
                assert (stats[-1].asleep, stats[-1].waiting, stats[-1].steps) == (1, 1, 0)
                engine.inbox.put(Wake(call_id=2))
            else:
                engine.inbox.close()

    with toy_engine(kv=KVConfig(initial_mib=1, max_gib=0.02, headroom_gib=0)) as engine:
        engine.inbox.put(Sleep(call_id=1, level=1), greedy("a", PROMPT))
        outlet = Outlet()
        engine.serve(outlet)
    assert outlet.rests == 2
    assert tokens_of(outlet.sent, "a") == TRUTH


def test_requests_are_aborted_while_the_engine_sleeps_and_others_go_on_after_waking(engine):
    engine.inbox.put(greedy("running", PROMPT), greedy("other", PROMPT))
    engine.step()
    call(engine, Sleep(call_id=1, level=1))
    engine.inbox.put(greedy("queued", PROMPT), Abort(request_ids=("running", "queued")))
    news = engine.step()
    for name in ("running", "queued"):
        assert [event.finish_reason for event in events_of(news, name)] == ["abort"]
    wake(engine)
    news = finish(engine)
    assert tokens_of(news, "other") == TRUTH[-len(tokens_of(news, "other")) :]
    assert (engine.stats().blocks_used, engine.stats().waiting) == (0, 0)
    engine.check()


async def test_a_client_waits_for_the_answer_and_raises_what_went_wrong():
    client = EngineThread("toy", toy_config(), load=load_toy)
    await client.start()
    try:
        state = await client.sleep(1)
        assert (state.asleep, client.stats.asleep, client.stalled_seconds) == (1, 1, 0.0)
        stream = client.generate(greedy("a", PROMPT))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert client.stalled_seconds == 0.0
        assert not first.done()
        assert (await client.wake()).asleep == 0
        events = [await first] + [event async for event in stream]
        assert [token for event in events for token in event.token_ids] == TRUTH
        with pytest.raises(InvalidRequest, match="level=3: must be 1"):
            await client.sleep(3)
        with pytest.raises(InvalidRequest, match="must not be negative"):
            await client.set_kv_target(-1)
        await client.sleep(2)
        with pytest.raises(SleepRefused, match="sleeps at level 2"):
            await client.sleep(1)
    finally:
        await client.close()
    with pytest.raises(EngineDead):
        await client.wake()
