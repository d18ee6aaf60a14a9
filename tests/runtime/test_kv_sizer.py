"""KV memory and block ids stay in step whatever the driver does: a failure is back-pressure, not the end."""

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.config import KVConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.kv_sizer import RETRY_S, KVSizer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.memory.vmm_host import HostVmm
from ostinato.runtime.scheduling.block_pool import BlockPool
from tests.support.engine_runs import generate, greedy, prompt_of, toy_config
from tests.support.faulty_driver import FaultyDriver, ModelVmm
from tests.support.toy_model import ToyModel

LAYERS = [KVLayer(kv_heads=2, k_size=8, v_size=8), KVLayer(kv_heads=1, k_size=16, v_size=4)]  # 832 bytes


class Sized:
    """Memory of 7 blocks that may become 40, in steps of 4, over a driver that can be told to fail."""

    def __init__(self) -> None:
        self.driver = FaultyDriver(ModelVmm(64))
        self.memory = KVPool(LAYERS, torch.float32, 4, 40, self.driver, step_bytes=4 * 832)
        self.blocks = BlockPool(self.memory.commit(7), 40, 4, prefix_cache=True)
        self.now = 100.0
        self.sizer = KVSizer(KVWorker(self.memory), self.blocks, clock=lambda: self.now)


@pytest.mark.parametrize("error", [VmmError, VmmOutOfMemory])
def test_a_driver_that_fails_to_grow_is_asked_again_after_a_while(error, caplog):
    calls = 1
    while True:
        sized = Sized()
        sized.driver.arm(calls, keeps_failing=True, error=error)
        sized.sizer.grow(4)
        if sized.blocks.committed == 11:
            break  # more calls than a growth makes
        assert sized.blocks.committed == 7
        assert "KV memory stays at 7 blocks" in caplog.text
        assert "made to fail" in caplog.text
        assert not sized.sizer.may_grow
        sized.driver.heal()
        sized.sizer.check()
        sized.sizer.grow(4)
        assert sized.blocks.committed == 7
        sized.now += RETRY_S
        sized.sizer.grow(4)
        assert sized.blocks.committed == 11
        sized.sizer.check()
        calls += 1
        caplog.clear()
    assert calls > 8


def test_memory_that_the_driver_fails_to_free_is_freed_at_the_next_rest(caplog):
    sized = Sized()
    sized.sizer.grow(4)
    full = sized.memory.physical_bytes
    sized.driver.arm(1, keeps_failing=True)
    sized.sizer.shrink()
    assert "the next rest tries again" in caplog.text
    assert (sized.blocks.committed, sized.memory.physical_bytes) == (7, full)
    sized.sizer.check()
    sized.driver.heal()
    sized.sizer.shrink()
    assert sized.memory.physical_bytes == sized.driver.inner.physical_bytes < full
    sized.sizer.check()
    before = len(sized.driver.calls)
    sized.sizer.shrink()
    assert len(sized.driver.calls) == before  # nothing is owed any more


def test_an_engine_whose_driver_fails_goes_on_with_the_memory_it_has(monkeypatch, caplog):
    driver = FaultyDriver(HostVmm())
    monkeypatch.setattr("ostinato.runtime.kv_memory.usable_driver", lambda _: driver)
    kv = KVConfig(initial_mib=1, max_gib=0.02, headroom_gib=0)
    with Engine(ToyModel(), toy_config(kv=kv)) as engine:
        start = engine.stats().blocks_committed
        driver.arm(1, keeps_failing=True)
        prompts = {f"r{i}": prompt_of(500, i) for i in range(12)}  # 32 blocks each
        answers = generate(engine, *(greedy(name, prompt, 4) for name, prompt in prompts.items()))
        assert "KV memory stays at" in caplog.text
        assert engine.stats().blocks_committed == start < 12 * 32
        assert answers == {name: ToyModel().greedy(prompt, 4) for name, prompt in prompts.items()}
        driver.heal()
        engine.check()


def test_blocks_that_cannot_be_moved_for_want_of_memory_stay_and_are_tried_again_later(caplog):
    sized = Sized()
    held = sized.blocks.allocate(7)
    sized.blocks.free(held[:3])  # at the front: what is left must move to get under the target
    sized.sizer.set_target(4 * sized.memory.block_bytes)

    def full(moves):
        raise torch.OutOfMemoryError("CUDA out of memory")

    moved = []
    sized.sizer.grow(0)
    assert sized.sizer.wants_quiet
    sized.sizer.cut(full)
    assert not sized.sizer.wants_quiet  # steps go on
    assert "blocks cannot be moved: CUDA out of memory" in caplog.text
    assert sized.blocks.committed == 7
    sized.sizer.grow(0)
    assert not sized.sizer.wants_quiet
    sized.now += RETRY_S
    sized.sizer.grow(0)
    sized.sizer.cut(moved.extend)
    assert sized.blocks.committed == 4
    assert len(moved) == 3
    sized.sizer.check()
