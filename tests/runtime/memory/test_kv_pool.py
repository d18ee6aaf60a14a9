"""KV planes that grow in place: shapes, limits, life after close."""

import gc
import logging
import re
from pathlib import Path

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.memory_limits import MemoryLimits
from ostinato.runtime.memory.vmm_host import HostVmm
from ostinato.runtime.memory.vmm_plain import PlainVmm
from tests.support.faulty_driver import ModelVmm
from tests.support.kv_pools import EQUAL, free_memory, small_pool

MIB = 1 << 20
DEMO = [KVLayer(kv_heads=3, k_size=64, v_size=64)] * 30


def shmem_resident() -> int:
    return int(re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def test_planes_span_the_capacity_in_layer_order_and_cost_nothing():
    driver = HostVmm()
    pool = small_pool(driver, capacity=1 << 30)
    shapes = [tuple(plane.shape) for plane in pool.planes()]
    assert shapes == [(1 << 30, 4, 2, 8), (1 << 30, 4, 2, 8), (1 << 30, 4, 1, 16), (1 << 30, 4, 1, 4)]
    assert all(plane.is_contiguous() and plane.dtype == torch.float32 for plane in pool.planes())
    assert (pool.block_bytes, pool.committed_blocks, pool.physical_bytes) == (832, 0, 0)
    assert pool.close()


def test_all_layers_get_the_same_blocks_and_whole_granules_are_used():
    pool = small_pool(HostVmm(4096))
    assert pool.commit(1) == 16  # 4096 / 256: the plane of 64 bytes could hold more, the others could not
    assert pool.physical_bytes == 4 * 4096
    assert pool.commit(17) == 32
    assert pool.physical_bytes == 7 * 4096
    pool.check()
    for value, plane in enumerate(pool.planes(), start=1):
        plane[:32].fill_(value)
    assert [float(plane[:32].sum()) / plane[:32].numel() for plane in pool.planes()] == [1, 2, 3, 4]


def test_growth_keeps_addresses_and_content_and_new_blocks_are_zero():
    pool = small_pool(HostVmm(4096))
    pool.commit(16)
    planes = pool.planes()
    addresses = [plane.data_ptr() for plane in planes]
    for plane in planes:
        plane[:16] = 2.5
    pool.commit(32)
    assert [plane.data_ptr() for plane in pool.planes()] == addresses
    assert all(torch.equal(plane[:16], torch.full_like(plane[:16], 2.5)) for plane in planes)
    assert all(int(plane[16:32].count_nonzero()) == 0 for plane in planes)
    pool.shrink(3)
    pool.commit(32)
    assert all(float(plane[:3].min()) == 2.5 and int(plane[3:32].count_nonzero()) == 0 for plane in planes)


def test_torch_ops_work_on_the_committed_part_while_the_rest_is_unmapped():
    pool = small_pool(HostVmm(4096), capacity=1 << 20)
    pool.commit(16)
    k = pool.planes()[0]
    rows = torch.arange(128, dtype=torch.float32).view(8, 16)
    k.view(-1, 16).index_copy_(0, torch.arange(20, 28), rows)
    assert torch.equal(k[5:7].reshape(8, 16), rows)
    assert torch.equal(
        torch.nn.functional.linear(k[5, 0], k[6, 0]), rows[0].view(2, 8) @ rows[4].view(2, 8).T
    )


def test_shrinking_gives_memory_back_and_recommitted_blocks_read_zero():
    pool = KVPool(DEMO[:8], torch.float32, 16, 1_000, HostVmm(), step_bytes=2 * MIB)
    pool.commit(200)
    planes = pool.planes()
    for plane in planes:
        plane[:200] = 1.0
    full, held = shmem_resident(), pool.physical_bytes
    assert pool.shrink(10) == 10
    assert held - pool.physical_bytes > 30 * MIB
    assert full - shmem_resident() > 30 * MIB
    assert pool.commit(100) >= 100
    assert all(int(plane[10:100].count_nonzero()) == 0 and float(plane[:10].min()) == 1 for plane in planes)
    pool.check()


def test_growth_stops_at_the_capacity_without_an_error():
    pool = small_pool(HostVmm(4096), capacity=20)
    assert pool.commit(20) == 20
    assert pool.stopped_by is None
    assert pool.commit(21) == 20
    assert "capacity of 20 blocks" in pool.stopped_by
    assert pool.commit(5) == 20
    assert pool.stopped_by is None


def test_growth_stops_where_memory_less_the_headroom_ends_and_goes_on_later(tmp_path):
    free_memory(tmp_path, 100.02)
    pool = small_pool(HostVmm(4096), limits=MemoryLimits(100 * MIB, tmp_path))
    assert pool.commit(16) == 16  # 16 KiB of 20 KiB
    free_memory(tmp_path, 100.005)
    assert pool.commit(40) == 16
    assert pool.stopped_by == "24576 bytes needed, 5120 may be taken (headroom 104857600 bytes)"
    free_memory(tmp_path, 200)
    assert pool.commit(40) == 40
    assert pool.stopped_by is None


def test_a_full_device_stops_growth_with_all_layers_equal():
    driver = ModelVmm(64, limit=64 * 60)
    pool = small_pool(driver, step_bytes=832 * 2)
    committed = pool.commit(40)
    assert 0 < committed < 10
    assert "device is full" in pool.stopped_by
    assert pool.physical_bytes == driver.physical_bytes <= 64 * 60
    pool.check()
    driver.limit = 1 << 30
    assert pool.commit(40) == 40


def test_a_step_of_growth_is_bounded_and_reaches_all_that_was_asked():
    pool = KVPool(DEMO, torch.float32, 16, 1_000, HostVmm(), step_bytes=8 * MIB)
    assert pool.grow_step * pool.block_bytes <= 8 * MIB < (pool.grow_step + 1) * pool.block_bytes
    before = pool.commit(30)
    assert (
        pool.commit(before + pool.grow_step) - before <= pool.grow_step + 5
    )  # 64 KiB hold 5.3 blocks of a plane


def test_released_pool_keeps_planes_and_comes_back_zeroed():
    pool = small_pool(HostVmm(4096))
    pool.commit(16)
    planes = pool.planes()
    planes[3][:16] = 4.0
    pool.release_physical()
    assert (pool.physical_bytes, pool.committed_blocks, pool.is_released) == (0, 0, True)
    for verb in (pool.commit, pool.shrink):
        with pytest.raises(ValueError, match="call recommit first"):
            verb(3)
    assert pool.recommit() == 16
    assert int(planes[3][:16].count_nonzero()) == 0
    with pytest.raises(ValueError, match="nothing was released"):
        pool.recommit()


def test_defragment_backs_each_plane_by_one_handle():
    driver = HostVmm(4096)
    pool = small_pool(driver, step_bytes=4096)
    pool.commit(40)
    assert driver.live_handles > 4
    pool.defragment()
    assert (driver.live_handles, pool.committed_blocks) == (4, 40)
    pool.check()


def test_narrowed_views_keep_address_and_strides_and_end_with_the_committed_blocks():
    pool = small_pool(HostVmm(4096))
    pool.commit(16)
    for plane, view in zip(pool.planes(), pool.narrowed(), strict=True):
        assert (view.data_ptr(), view.stride(), view.shape) == (
            plane.data_ptr(),
            plane.stride(),
            (16, *plane.shape[1:]),
        )
        assert view.untyped_storage().nbytes() == view.numel() * 4


def test_tensors_used_after_close_are_safe_and_the_last_one_frees_the_memory(caplog):
    driver = HostVmm(4096)
    pool = small_pool(driver)
    pool.commit(16)
    late = pool.planes()[1]
    late[:16] = 1.5
    with caplog.at_level(logging.WARNING):
        assert pool.close() is False
    assert "tensors still hold" in caplog.text
    assert pool.close() is True  # nothing more to let go
    assert float(late[:16].sum()) == 1.5 * 16 * 4 * 2 * 8
    assert driver.live_handles == 2  # K and V of that layer are one buffer
    del late
    assert driver.live_handles == 0
    for verb in (pool.planes, pool.narrowed, lambda: pool.commit(1), lambda: pool.shrink(0), pool.recommit):
        with pytest.raises(ValueError, match="closed"):
            verb()


def test_a_forgotten_pool_is_freed():
    driver = HostVmm(4096)
    small_pool(driver).commit(5)
    gc.collect()
    assert driver.live_handles == 0


def test_the_plain_driver_serves_too_and_costs_its_capacity_at_once():
    pool = small_pool(PlainVmm(), capacity=16)
    assert pool.physical_bytes == 4 * 4096
    assert pool.commit(16) == 16
    planes = pool.planes()
    planes[2][:] = 3.0
    pool.shrink(1)
    assert pool.physical_bytes == 4 * 4096
    assert pool.commit(16) == 16
    assert (float(planes[2][0].min()), int(planes[2][1:].count_nonzero())) == (3.0, 0)
    pool.check()


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"kv_layers": []}, "kv_layers: empty"),
        ({"capacity_blocks": 0}, "capacity_blocks=0"),
        ({"capacity_blocks": 1 << 31}, "capacity_blocks=2147483648"),
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"step_bytes": 0}, "step_bytes=0"),
        ({"kv_layers": [KVLayer(kv_heads=1, k_size=4, v_size=0)]}, "must be at least 1"),
    ],
)
def test_impossible_pools_are_refused(named, says):
    right = {
        "kv_layers": [EQUAL],
        "dtype": torch.float32,
        "block_tokens": 4,
        "capacity_blocks": 4,
        "driver": ModelVmm(),
    }
    with pytest.raises(ValueError, match=re.escape(says)):
        KVPool(**{**right, **named})


def test_negative_block_counts_are_refused():
    pool = small_pool(ModelVmm(64))
    with pytest.raises(ValueError, match=r"commit\(-1\)"):
        pool.commit(-1)
    with pytest.raises(ValueError, match=r"shrink\(-1\)"):
        pool.shrink(-1)
