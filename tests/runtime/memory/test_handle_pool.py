"""Physical memory made ahead: who gets it, and how it goes back."""

import pytest

from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from tests.support.faulty_driver import FaultyDriver, ModelVmm


def test_spare_handles_are_used_first_and_fresh_ones_made_when_they_end():
    inner = ModelVmm(4)
    pool = HandlePool(inner)
    pool.prepare({8: 2, 4: 1})
    assert (pool.spare_bytes, inner.created) == (20, 3)
    taken = [pool.create(8) for _ in range(3)]
    assert (pool.spare_bytes, inner.created, len(set(taken))) == (4, 4, 3)
    assert pool.missing_bytes({8: 2, 4: 2}) == 20
    pool.prepare({8: 2, 4: 2})
    assert pool.missing_bytes({8: 2, 4: 2}) == 0
    for handle in taken:
        pool.release(handle)
    assert inner.physical_bytes == pool.spare_bytes == 24  # what is released does not become spare


def test_trimming_gives_every_spare_handle_back():
    inner = ModelVmm(4)
    pool = HandlePool(inner)
    pool.prepare({8: 2, 4: 2})
    pool.trim()
    assert pool.spare_bytes == 0 == inner.physical_bytes
    assert inner.created == inner.released == 4


def test_a_handle_that_the_driver_does_not_take_back_stays_spare():
    driver = FaultyDriver(ModelVmm(4))
    pool = HandlePool(driver)
    pool.prepare({8: 2})
    driver.arm(2)
    with pytest.raises(VmmError, match="release: made to fail"):
        pool.trim()
    assert pool.spare_bytes == 8 == driver.inner.physical_bytes
    pool.trim()
    assert pool.spare_bytes == 0 == driver.inner.physical_bytes


def test_a_full_device_ends_preparation_and_spare_memory_of_other_sizes_makes_room():
    inner = ModelVmm(4, limit=20)
    pool = HandlePool(inner)
    pool.prepare({8: 5})
    assert pool.spare_bytes == 16
    pool.create(12)
    assert (pool.spare_bytes, inner.physical_bytes) == (0, 12)
    with pytest.raises(VmmOutOfMemory):
        pool.create(12)
