"""A driver that fails in the middle of the layers: all stay equal, nothing leaks, a retry works."""

import random
import re

import pytest

from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from tests.support.faulty_driver import FaultyDriver, ModelVmm
from tests.support.kv_pools import small_pool

OPERATIONS = {
    "commit": lambda p: p.commit(23),
    "shrink": lambda p: p.shrink(2),
    "release": lambda p: p.release_physical(),
    "recommit": lambda p: (p.release_physical(), p.recommit()),
    "defragment": lambda p: p.defragment(),
}


def faulty_pool() -> tuple[FaultyDriver, KVPool]:
    driver = FaultyDriver(ModelVmm(64))
    pool = small_pool(driver, step_bytes=8 * 832)
    pool.commit(7)
    pool.commit(15)
    for number, plane in enumerate(pool.planes()):
        plane[:15] = number + 1
    return driver, pool


@pytest.mark.parametrize("keeps_failing", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_failure_of_any_driver_call_leaves_all_layers_equal_and_a_retry_works(name, keeps_failing):
    driver, pool = faulty_pool()
    before = driver.counts.total()
    OPERATIONS[name](pool)
    calls = driver.counts.total() - before
    assert calls >= 8
    for k in range(1, calls + 1):
        driver, pool = faulty_pool()
        planes = pool.planes()
        driver.arm(k, keeps_failing=keeps_failing)
        with pytest.raises(VmmError, match="made to fail"):
            OPERATIONS[name](pool)
        driver.heal()
        assert pool.physical_bytes == driver.inner.physical_bytes
        if name == "commit":
            assert pool.committed_blocks == 15
        if name == "shrink":
            assert pool.committed_blocks == 2
        if name in ("commit", "shrink"):
            pool.check()
            assert all(float(plane[:2].min()) == n + 1 for n, plane in enumerate(planes))
            OPERATIONS[name](pool)
        elif pool.is_released:
            pool.release_physical()
            pool.check()
            assert pool.physical_bytes == 0
            assert pool.recommit() == 15
            assert all(int(plane[:15].count_nonzero()) == 0 for plane in planes)
        assert pool.commit(40) == 40
        pool.check()
        assert all(int(plane[15:].count_nonzero()) == 0 for plane in planes)
        assert pool.close()
        model = driver.inner
        assert (model.created, model.physical_bytes, model.reservations) == (model.released, 0, {})


def test_recommit_after_a_release_that_missed_a_layer_zeroes_that_layer_too():
    driver, pool = faulty_pool()
    driver.arm(2)  # the first layer's first unmap
    with pytest.raises(VmmError, match="unmap: made to fail"):
        pool.release_physical()
    assert pool.recommit() == 15
    pool.check()
    assert all(int(plane[:15].count_nonzero()) == 0 for plane in pool.planes())


def test_after_a_failed_defragment_the_pool_is_released():
    driver, pool = faulty_pool()
    driver.arm(2)
    with pytest.raises(VmmError, match="made to fail"):
        pool.defragment()
    assert (pool.is_released, pool.committed_blocks, pool.physical_bytes) == (True, 0, 0)


def test_lack_of_memory_in_any_layer_is_rolled_back_and_not_raised():
    for k in range(1, 13):
        driver, pool = faulty_pool()
        physical = pool.physical_bytes
        driver.arm(k, error=VmmOutOfMemory)
        assert pool.commit(23) == 15
        assert (pool.physical_bytes, pool.stopped_by) == (physical, driver_said(pool))
        pool.check()
        assert pool.commit(23) == 23


def driver_said(pool: KVPool) -> str:
    assert re.fullmatch(r"(create|map|set_access|zero): made to fail", pool.stopped_by)
    return pool.stopped_by


def test_random_commits_and_shrinks_keep_the_books():
    rng = random.Random(1)
    driver = FaultyDriver(ModelVmm(64))
    pool = small_pool(driver, step_bytes=2_000)
    for step in range(2_000):
        if rng.random() < 0.3:
            driver.arm(
                rng.randrange(1, 20),
                keeps_failing=rng.random() < 0.3,
                error=rng.choice([VmmError, VmmOutOfMemory]),
            )
        try:
            (pool.commit if rng.random() < 0.5 else pool.shrink)(rng.randrange(41))
        except VmmError as error:
            assert "made to fail" in str(error)  # noqa: PT017  # either outcome is fine, the books must be right
        driver.heal()
        if step % 10 == 0:
            pool.check()
        assert pool.physical_bytes == driver.inner.physical_bytes
    assert pool.close()
    assert driver.inner.created == driver.inner.released
