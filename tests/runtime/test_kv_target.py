"""KV memory while an engine works: watermarks, targets, moved blocks, sleep. Answers never change."""

import random

import pytest
import torch

from ostinato.errors import EngineError
from ostinato.graph.facts import KVLayer
from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.kv_sizer import KVSizer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.vmm import MemoryRegistered, VmmError, VmmOutOfMemory
from ostinato.runtime.messages import KVTarget
from ostinato.runtime.scheduling.block_pool import BlockPool
from tests.support.engine_runs import BLOCK_BYTES, finish, generate, greedy, prompt_of, tokens_of, toy_engine
from tests.support.faulty_driver import FaultyDriver, ModelVmm
from tests.support.toy_model import ToyModel

LAYERS = [KVLayer(kv_heads=2, k_size=8, v_size=8)]  # 512 bytes a block, a granule is an eighth of it
TOY = ToyModel()


class Sized:
    """Memory of 8 blocks that may become 100, in steps of 4, and a clock."""

    def __init__(self, **named) -> None:
        self.driver = FaultyDriver(ModelVmm(64))
        self.pool = KVPool(LAYERS, torch.float32, 4, 100, self.driver, step_bytes=4 * 512)
        self.blocks = BlockPool(self.pool.commit(8), 100, 4, prefix_cache=True)
        self.now = 100.0
        self.sizer = KVSizer(KVWorker(self.pool), self.blocks, clock=lambda: self.now, **named)

    def turns(self, count: int, wanted: int = 0) -> int:
        for _ in range(count):
            self.sizer.grow(wanted)
            if self.sizer.wants_quiet:
                self.sizer.cut(lambda moves: None)
        self.sizer.check()
        return self.blocks.committed


def test_memory_grows_to_the_high_mark_when_free_blocks_fall_under_the_low_one():
    sized = Sized(low=6, high=12)
    assert sized.turns(3) == 8  # eight are free
    sized.blocks.allocate(3)
    assert sized.turns(3) == 15  # five were: twelve are now
    assert sized.turns(3) == 15


def test_blocks_that_nobody_has_needed_for_a_while_go_back_down_to_the_high_mark():
    sized = Sized(low=2, high=4, idle_s=30.0)
    held = sized.blocks.allocate(8)
    assert sized.turns(20, wanted=80) == 88
    assert sized.turns(1) == 88
    sized.now += 20
    more = sized.blocks.allocate(30)  # needed for a moment
    sized.turns(1)
    sized.blocks.free(more)
    sized.now += 9
    assert sized.turns(2) == 88
    sized.now += 2
    assert sized.turns(2) == 8 + 30 + 4  # 46 blocks were free all the time, the high mark not counted
    sized.blocks.free(held)
    sized.turns(1)
    sized.now += 31
    assert sized.turns(2) == 12  # the eight were needed when this while began
    sized.now += 31
    assert sized.turns(2) == 8  # never below the start
    assert sized.pool.physical_bytes == 8 * 512


def test_a_target_ends_growth_and_takes_back_what_is_above_it():
    sized = Sized()
    sized.turns(10, wanted=40)
    held = sized.blocks.allocate(20)
    sized.blocks.free(held[:15])
    moved = []
    sized.sizer.set_target(10 * 512 + 100)
    sized.sizer.grow(5)
    assert sized.sizer.wants_quiet
    sized.sizer.cut(moved.extend)
    assert [source for source, _ in moved] == held[15:]
    assert sorted(target for _, target in moved) == [0, 1, 2, 3, 4]
    assert (sized.blocks.committed, sized.pool.physical_bytes) == (10, 12 * 512)  # whole extents go back
    assert not sized.sizer.may_grow
    assert sized.turns(5, wanted=5) == 10
    sized.sizer.set_target(None)
    assert sized.turns(5, wanted=5) > 10
    with pytest.raises(ValueError, match=r"target_bytes=-1: must not be negative"):
        sized.sizer.set_target(-1)


def test_a_target_below_what_is_in_use_is_reached_as_blocks_come_free():
    sized = Sized()
    held = sized.blocks.allocate(8)
    sized.sizer.set_target(0)  # one block stays
    assert sized.turns(2) == 8
    sized.blocks.free(held[:4])
    assert sized.turns(2) == 4
    sized.blocks.free([0, 1, 2])  # where the other four have moved to
    assert sized.turns(2) == 1


def test_registered_memory_is_kept_until_it_is_let_go():
    sized = Sized()
    sized.turns(10, wanted=40)
    grown = sized.blocks.committed
    sized.pool.register("offload")
    sized.sizer.set_target(10 * 512)
    assert sized.turns(3) == grown
    sized.sizer.shrink()
    assert sized.turns(1) == grown
    with pytest.raises(MemoryRegistered, match="sleep: offload has registered"):
        sized.sizer.sleep()
    sized.pool.unregister("offload")
    assert sized.turns(2) == 10


def test_a_request_that_fits_nowhere_waits_for_memory_of_others_as_long_as_it_was_told():
    sized = Sized(patience_s=5.0)
    sized.driver.arm(1, keeps_failing=True, error=VmmOutOfMemory)
    sized.sizer.grow(4)
    assert sized.sizer.may_grow
    sized.now += 4.9
    sized.sizer.grow(4)
    assert sized.sizer.may_grow
    sized.now += 0.2
    assert not sized.sizer.may_grow
    sized.driver.heal()
    sized.now += 1.0
    assert sized.turns(1, wanted=4) == 12


def test_sleep_gives_everything_back_and_waking_gives_the_start_again():
    sized = Sized()
    sized.turns(10, wanted=40)
    planes = sized.pool.planes()
    addresses = [plane.data_ptr() for plane in planes]
    held = sized.blocks.allocate(3)
    planes[0][held[0]] = 5.0
    with pytest.raises(EngineError, match="running requests hold 3 KV blocks"):
        sized.sizer.sleep()
    sized.blocks.publish(held[0], b"k" * 32)
    sized.blocks.free(held)
    sized.sizer.sleep()
    assert (sized.driver.inner.physical_bytes, sized.blocks.committed, sized.sizer.is_asleep) == (0, 0, True)
    assert sized.turns(2, wanted=5) == 0
    sized.driver.arm(3, error=VmmOutOfMemory)
    with pytest.raises(VmmOutOfMemory):
        sized.sizer.wake()
    assert (sized.driver.inner.physical_bytes, sized.sizer.is_asleep) == (0, True)
    with pytest.MonkeyPatch.context() as wrong:
        wrong.setattr(sized.driver.inner, "mapped_bytes", lambda address, size: 64)
        with pytest.raises(VmmError, match="64 by the driver's"):
            sized.sizer.wake()
    assert (sized.driver.inner.physical_bytes, sized.sizer.is_asleep) == (0, True)
    sized.sizer.wake()
    assert (sized.turns(1), sized.blocks.lookup(b"k" * 32)) == (8, None)
    assert [plane.data_ptr() for plane in sized.pool.planes()] == addresses
    assert all(int(plane[:8].count_nonzero()) == 0 for plane in planes)


def test_targets_that_change_all_the_time_change_no_answer():
    choose = random.Random(5)
    requests = [
        greedy(f"r{i}", prompt_of(choose.randrange(5, 100), i), choose.randrange(2, 20)) for i in range(16)
    ]
    sizes, moves = set(), 0
    with toy_engine(scheduler=SchedulerConfig(max_running=6, max_step_tokens=64)) as engine:
        really_move = engine._scheduler.move_blocks

        def counted(pairs):
            nonlocal moves
            moves += len(pairs)
            really_move(pairs)

        engine._scheduler.move_blocks = counted
        engine.inbox.put(*requests)
        news = engine.step()
        while engine.has_work:
            if choose.random() < 0.4:
                engine.inbox.put(KVTarget(call_id=0, target_bytes=BLOCK_BYTES * choose.randrange(8, 60)))
            news += engine.step()
            engine.check()
            sizes.add(engine.stats().blocks_committed)
        for request in requests:
            truth = TOY.greedy(request.prompt_token_ids, request.sampling.max_tokens)
            assert tokens_of(news, request.request_id) == truth
    assert len(sizes) > 5
    assert moves > 20


def test_cached_prefixes_survive_a_move():
    with toy_engine() as engine:
        prompt = prompt_of(160)
        engine.inbox.put(*(greedy(f"r{i}", prompt_of(300, i + 1), 2) for i in range(8)))
        finish(engine)
        generate(engine, greedy("first", prompt, 4))
        engine.inbox.put(
            KVTarget(call_id=0, target_bytes=20 * BLOCK_BYTES)
        )  # the last used of the cached ones find room
        engine.step()
        assert engine.stats().blocks_committed == 20
        hits = engine.stats().prefix_hits
        assert generate(engine, greedy("again", prompt, 4)) == {"again": TOY.greedy(prompt, 4)}
        assert engine.stats().prefix_hits == hits + 144
        engine.check()
