"""Memory that a connector has registered may grow and is never taken away; defragmenting commit."""

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import MemoryRegistered
from tests.support.faulty_driver import FaultyDriver, ModelVmm

LAYERS = [KVLayer(kv_heads=2, k_size=8, v_size=8)]


@pytest.fixture
def driver() -> FaultyDriver:
    return FaultyDriver(ModelVmm(64))


@pytest.fixture
def pool(driver) -> KVPool:
    pool = KVPool(LAYERS, torch.float32, 4, 100, driver, step_bytes=512 * 4)
    pool.commit(20)
    return pool


@pytest.mark.parametrize(
    "verb",
    [
        lambda pool: pool.shrink(3),
        lambda pool: pool.release_physical(),
        lambda pool: pool.defragment(),
        lambda pool: pool.commit(30, defragment=True),
    ],
)
def test_nothing_is_unmapped_while_a_connector_holds_the_memory(pool, driver, verb):
    views = pool.register("offload")
    pool.register("transfer")
    views[0][:] = 2.0
    made = len(driver.calls)
    with pytest.raises(MemoryRegistered, match="offload, transfer has registered the memory"):
        verb(pool)
    assert (len(driver.calls), pool.committed_blocks) == (made, 20)
    assert float(views[0].min()) == 2.0
    assert pool.commit(40) == 40
    pool.unregister("offload")
    pool.unregister("transfer")
    assert pool.registered_by == ()
    verb(pool)


def test_a_defragmenting_commit_gives_one_handle_per_plane_and_zeros(pool, driver):
    pool.planes()[0][:20] = 1.0
    assert pool.commit(50, defragment=True) == 50
    assert len(driver.inner.handles) == 2
    assert int(pool.planes()[0][:50].count_nonzero()) == 0
    pool.check()
