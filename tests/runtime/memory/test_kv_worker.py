"""Memory that grows and shrinks on a thread of its own: what the engine may use at every moment."""

import threading

import pytest
import torch

from ostinato.errors import EngineError
from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.device_limits import DeviceLimits
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from tests.support.faulty_driver import FaultyDriver, ModelVmm

LAYERS = [KVLayer(kv_heads=2, k_size=8, v_size=8)]  # 512 bytes a block, both planes
STEP = 4  # blocks


class Gated(ModelVmm):
    """A driver whose `create` and `unmap` wait at a gate when it is closed."""

    def __init__(self) -> None:
        super().__init__(64)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.created_one = threading.Event()

    def _pass(self) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(20)

    def create(self, size, *, at=None):
        self._pass()
        self.created_one.set()
        return super().create(size, at=at)

    def unmap(self, address, size):
        self._pass()
        super().unmap(address, size)


def pool_over(driver, **named) -> KVPool:
    return KVPool(LAYERS, torch.float32, 4, 100, driver, step_bytes=STEP * 512, **named)


@pytest.fixture
def driver() -> Gated:
    return Gated()


@pytest.fixture
def worker(driver):
    worker = KVWorker(pool_over(driver), is_threaded=True)
    yield worker
    driver.gate.set()
    worker.close()
    assert driver.physical_bytes == 0


def test_growth_goes_on_beside_the_caller_and_shows_when_it_is_done(driver, worker):
    driver.gate.clear()
    worker.grow_to(10)
    assert driver.waiting.wait(20)
    assert (worker.usable, worker.is_busy) == (0, True)
    driver.gate.set()
    worker.wait()
    assert (worker.usable, worker.is_busy, worker.take_refusal()) == (10, False, None)
    worker.check()


def test_a_newer_goal_replaces_the_older_one_after_the_step_that_runs(driver, worker):
    driver.gate.clear()
    worker.grow_to(90)
    assert driver.waiting.wait(20)
    worker.grow_to(6)
    driver.gate.set()
    worker.wait()
    assert worker.usable == 6


def test_blocks_are_not_usable_from_the_moment_they_are_to_go(driver, worker):
    worker.grow_to(40)
    worker.wait()
    driver.gate.clear()
    worker.shrink_to(8)
    assert worker.usable == 8
    assert driver.waiting.wait(20)
    worker.grow_to(20)  # needed again before they have gone
    assert worker.usable == 8
    driver.gate.set()
    worker.wait()
    assert worker.usable == 20
    assert worker.physical_bytes == 20 * 512


def test_nothing_changes_while_it_is_paused(driver, worker):
    with worker.paused() as pool:
        worker.grow_to(12)
        assert not driver.created_one.wait(0.2)  # the thread would not have waited so long
        assert (pool.committed_blocks, driver.created) == (0, 0)
    worker.wait()
    assert worker.usable == 12


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("error", [VmmError, VmmOutOfMemory])
def test_a_driver_that_fails_is_a_refusal_and_leaves_what_was_there(is_threaded, error):
    driver = FaultyDriver(ModelVmm(64))
    worker = KVWorker(pool_over(driver), is_threaded=is_threaded)
    worker.grow_to(STEP)
    worker.wait()
    driver.arm(2, error=error)
    worker.grow_to(STEP + 1)
    worker.wait()
    assert (worker.usable, worker.take_refusal(), worker.take_refusal()) == (STEP, "map: made to fail", None)
    worker.check()
    worker.grow_to(STEP + 1)
    worker.wait()
    assert worker.usable == STEP + 1
    assert worker.close()


def test_without_a_thread_a_call_does_one_step():
    worker = KVWorker(pool_over(ModelVmm(64)))
    worker.grow_to(10)
    assert (worker.usable, worker.is_busy) == (4, False)
    worker.grow_to(10)
    worker.grow_to(10)
    assert worker.usable == 10


def test_the_memory_of_the_next_step_is_made_ahead_as_far_as_the_limits_allow():
    inner = ModelVmm(64, limit=1 << 20)
    spare = HandlePool(inner)
    limits = DeviceLimits(
        lambda: (inner.limit - inner.physical_bytes + spare.spare_bytes, inner.limit), 1 << 19
    )
    pool = pool_over(spare, limits=limits)
    worker = KVWorker(pool, spare=spare, limits=limits)
    assert pool.handles_of_step() == {STEP * 256: 2}
    worker.prepare()
    assert spare.spare_bytes == STEP * 512 == worker.physical_bytes
    made = inner.created
    worker.grow_to(STEP)
    assert (worker.usable, inner.created, spare.spare_bytes) == (STEP, made, 0)
    inner.limit = (1 << 19) + inner.physical_bytes + STEP * 512 - 1  # a byte too little
    worker.prepare()
    assert spare.spare_bytes == 0
    worker.grow_to(2 * STEP)
    assert worker.usable == STEP
    assert "may be taken (headroom 524288 bytes)" in worker.take_refusal()
    inner.limit += 1
    worker.prepare()
    assert spare.spare_bytes == STEP * 512
    worker.shrink_to(0)
    assert (worker.physical_bytes, inner.physical_bytes) == (0, 0)


def test_shrinking_gives_back_spare_memory_that_is_just_being_made(driver):
    spare = HandlePool(driver)
    worker = KVWorker(pool_over(spare), is_threaded=True, spare=spare)
    worker.grow_to(STEP)
    worker.wait()
    held = driver.physical_bytes
    driver.gate.clear()
    worker.prepare()
    assert driver.waiting.wait(20)
    worker.shrink_to(STEP)  # as an engine does that goes to sleep, or gives to another
    driver.gate.set()
    worker.wait()
    with worker.paused():
        assert (driver.physical_bytes, spare.spare_bytes) == (held, 0)
    assert (worker.physical_bytes, worker.usable) == (held, STEP)
    worker.close()
    assert driver.physical_bytes == 0


def test_spare_memory_goes_back_though_the_rest_is_registered(caplog):
    inner = ModelVmm(64)
    spare = HandlePool(inner)
    worker = KVWorker(pool_over(spare), spare=spare)
    worker.grow_to(STEP)
    held = inner.physical_bytes
    worker.prepare()
    worker.pool.register("offload")
    worker.shrink_to(STEP)
    assert (inner.physical_bytes, worker.usable, caplog.text) == (held, STEP, "")


def test_what_is_spare_already_is_not_taken_for_room_for_more():
    inner = ModelVmm(64, limit=1 << 20)
    spare = HandlePool(inner)
    limits = DeviceLimits(
        lambda: (inner.limit - inner.physical_bytes + spare.spare_bytes, inner.limit), 1 << 19
    )
    worker = KVWorker(pool_over(spare, limits=limits), spare=spare, limits=limits)
    worker.prepare()
    spare.create(STEP * 256)  # one of the two handles of a step
    inner.limit = (1 << 19) + inner.physical_bytes + STEP * 256 - 1  # a byte too little for another
    worker.prepare()
    assert spare.spare_bytes == STEP * 256
    inner.limit += 1
    worker.prepare()
    assert spare.spare_bytes == STEP * 512


def test_a_bug_on_the_thread_is_raised_by_the_next_call_and_ends_every_wait():
    class Broken(ModelVmm):
        def create(self, size, *, at=None):
            raise RuntimeError("a bug")

    worker = KVWorker(pool_over(Broken(64)), is_threaded=True)
    worker.grow_to(3)
    with pytest.raises(EngineError, match=r"KV memory thread has ended: RuntimeError\('a bug'\)"):
        worker.wait()
    with pytest.raises(EngineError, match="a bug"):
        worker.grow_to(4)
    worker.close()
