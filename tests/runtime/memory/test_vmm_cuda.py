"""Elastic memory on a real GPU: content, addresses, graphs, full devices, running kernels. Seconds in all."""

import os
import threading
import time

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.block_copy import copy_blocks
from ostinato.runtime.memory.device_limits import DeviceLimits
from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.memory.vmm_cuda import CudaVmm

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LAYERS = [KVLayer(kv_heads=8, k_size=128, v_size=128)] * 8  # 32 KiB a block and plane: 64 blocks in 2 MiB
GRANULE_BLOCKS = 64
LONG_CYCLES = 200_000_000  # of the SM clock: about 0.1 s


@pytest.fixture(scope="module")
def driver() -> CudaVmm:
    driver = CudaVmm("cuda:0", shareable=True)
    assert driver.unavailable_reason() is None
    return driver


@pytest.fixture(autouse=True)
def nothing_is_left(driver):
    yield
    torch.cuda.synchronize()
    assert driver.live_handles == 0


def pool_of(driver, capacity: int = 1 << 20, **named) -> KVPool:
    return KVPool(LAYERS, torch.bfloat16, 16, capacity, driver, step_bytes=64 * MIB, **named)


def test_growth_keeps_base_bytes_and_views_and_more_addresses_than_memory_cost_nothing(driver):
    assert driver.granularity == 2 * MIB
    free = driver.memory().free
    buffer = ElasticBuffer(driver, 2, 1 << 40, extent_bytes=8 * MIB)
    views = [buffer.segment(0), buffer.segment(1)]
    assert free - driver.memory().free < 4 * MIB
    buffer.grow(3 * MIB)
    views[1][: 3 * MIB] = 7
    base = buffer.base
    buffer.grow(64 * MIB, zero_new=True)
    assert buffer.base == base == views[0].data_ptr()
    assert (int(views[1][: 3 * MIB].min()), int(views[1][: 3 * MIB].max())) == (7, 7)
    assert all(int(view[3 * MIB : 64 * MIB].count_nonzero()) == 0 for view in views)
    views[0][32 * MIB : 64 * MIB] = 9
    assert int(views[0][: 64 * MIB].sum(dtype=torch.int64)) >= 9 * 32 * MIB
    assert driver.is_mapped(base)
    assert not driver.is_mapped(base + 512 * MIB)
    del views
    assert buffer.close()


def test_shrinking_returns_physical_bytes_by_the_count_of_the_driver(driver):
    pool = pool_of(driver)
    pool.commit(GRANULE_BLOCKS)
    torch.cuda.synchronize()
    before = driver.memory().free
    pool.commit(16 * GRANULE_BLOCKS)
    held = pool.physical_bytes
    assert before - driver.memory().free >= 15 * 32 * MIB
    pool.shrink(GRANULE_BLOCKS)
    assert driver.memory().free >= before - 2 * MIB
    assert held - pool.physical_bytes >= 14 * 32 * MIB
    pool.check()
    assert pool.commit(2 * GRANULE_BLOCKS) >= 2 * GRANULE_BLOCKS
    assert all(
        int(plane[GRANULE_BLOCKS : 2 * GRANULE_BLOCKS].count_nonzero()) == 0 for plane in pool.planes()
    )
    assert pool.close()


def test_a_graph_captured_before_growth_reads_and_writes_new_blocks(driver):
    pool = pool_of(driver)
    pool.commit(GRANULE_BLOCKS)
    plane = pool.planes()[3]
    at = torch.tensor([5], device="cuda")
    new = torch.ones(1, *plane.shape[1:], dtype=plane.dtype, device="cuda")
    plane.index_copy_(0, at, new)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plane.index_copy_(0, at, new)
        seen = plane.index_select(0, at) * 2
    pool.commit(20 * GRANULE_BLOCKS)
    for block, value in ((19 * GRANULE_BLOCKS, 3.0), (5, 4.0)):
        at.fill_(block)
        new.fill_(value)
        graph.replay()
        assert float(plane[block].float().mean()) == value
        assert float(seen.float().mean()) == 2 * value
    del graph, plane, seen
    assert pool.close()


def test_a_full_device_stops_growth_in_the_middle_of_the_layers_and_undoes_it(driver):
    torch.cuda.empty_cache()
    pool = pool_of(driver)
    pool.commit(GRANULE_BLOCKS)
    pool.planes()[0][:GRANULE_BLOCKS] = 2.0
    torch.cuda.synchronize()
    hoard = []
    try:
        for size in (2048 * MIB, 128 * MIB, 2 * MIB):
            while True:
                try:
                    hoard.append(driver.create(size))
                except VmmOutOfMemory:
                    break
        for handle in [hoard.pop() for _ in range(5)]:
            driver.release(handle)
        live = driver.live_handles
        assert pool.commit(2 * GRANULE_BLOCKS) == GRANULE_BLOCKS  # 16 planes want a granule each
        assert pool.stopped_by == "cuMemCreate of 2 MiB failed: out of memory (2)"
        assert driver.live_handles == live
        pool.check()
    finally:
        for handle in hoard:
            driver.release(handle)
    assert pool.commit(2 * GRANULE_BLOCKS) >= 2 * GRANULE_BLOCKS
    assert float(pool.planes()[0][:GRANULE_BLOCKS].float().mean()) == 2.0
    assert pool.close()


def test_released_memory_comes_back_at_the_same_addresses_with_zeros(driver):
    pool = pool_of(driver)
    pool.commit(4 * GRANULE_BLOCKS)
    planes = pool.planes()
    planes[1][: 4 * GRANULE_BLOCKS] = 1.0
    addresses = [plane.data_ptr() for plane in planes]
    pool.release_physical()
    assert (pool.physical_bytes, driver.live_handles) == (0, 0)
    pool.recommit()
    assert [plane.data_ptr() for plane in pool.planes()] == addresses
    assert int(planes[1][: 4 * GRANULE_BLOCKS].count_nonzero()) == 0
    pool.defragment()
    assert driver.live_handles == 16
    del planes
    assert pool.close()


def test_a_handle_exported_and_imported_is_the_same_memory(driver):
    assert driver.is_shareable
    size = 2 * MIB
    base = driver.reserve(2 * size)
    first = driver.create(size)
    fd = driver.export_fd(first)
    second = driver.import_fd(fd, size)
    os.close(fd)
    for address, handle in ((base, first), (base + size, second)):
        driver.map(address, size, handle)
        driver.set_access(address, size)
    driver.tensor(base, size, None)[17] = 5
    assert int(driver.tensor(base + size, size, None)[17]) == 5
    torch.cuda.synchronize()
    driver.unmap(base, size)
    driver.unmap(base + size, size)
    driver.release(first)
    if second != first:  # the driver may give the handle that it knows
        driver.release(second)
    driver.free_reserved(base, 2 * size)


def test_memory_is_mapped_while_a_kernel_runs_and_unmapped_behind_it():
    driver = CudaVmm("cuda:0")
    stream = torch.cuda.Stream()
    driver.order_after(stream.cuda_stream)
    pool = pool_of(driver)
    pool.commit(GRANULE_BLOCKS)
    plane = pool.planes()[0]
    plane[:GRANULE_BLOCKS] = 0.0
    plane[:GRANULE_BLOCKS] += 1.0  # a kernel's first use loads it, which may take longer than the sleep
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        plane[:GRANULE_BLOCKS] += 1.0
        done = torch.cuda.Event()
        done.record()
    pool.commit(8 * GRANULE_BLOCKS)
    assert not done.query()  # growth has not waited
    pool.shrink(0)
    assert done.query()  # taking away has
    del plane
    assert pool.close()
    assert driver.live_handles == 0


def test_nothing_is_taken_away_while_a_stream_is_captured():
    driver = CudaVmm("cuda:0")
    stream = torch.cuda.Stream()
    driver.order_after(stream.cuda_stream)
    driver.quiesce()
    value = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value += 1
        with pytest.raises(VmmError, match="while a graph is captured"):
            driver.quiesce()
    graph.replay()
    assert float(value) == 1.0


def test_a_worker_grows_beside_replays_and_moved_blocks_keep_their_content(driver):
    spare = HandlePool(driver)
    limits = DeviceLimits(lambda: (driver.memory().free + spare.spare_bytes, driver.memory().total), 1 << 30)
    worker = KVWorker(pool_of(spare, limits=limits), is_threaded=True, spare=spare, limits=limits)
    worker.grow_to(GRANULE_BLOCKS)
    worker.wait()
    plane = worker.pool.planes()[5]
    plane[3] = 6.0
    worker.grow_to(12 * GRANULE_BLOCKS)
    while worker.usable < 12 * GRANULE_BLOCKS:
        plane[3] += 1.0
        torch.cuda.synchronize()
    worker.prepare()
    copy_blocks(worker.pool.planes(), [(3, 11 * GRANULE_BLOCKS)])
    assert torch.equal(plane[3], plane[11 * GRANULE_BLOCKS])
    copy_blocks(worker.pool.planes(), [(11 * GRANULE_BLOCKS, 4)])
    worker.shrink_to(GRANULE_BLOCKS)
    worker.wait()
    assert torch.equal(plane[3], plane[4])
    assert float(plane[4].float().min()) >= 6.0
    worker.check()
    del plane
    assert worker.close()


def test_the_last_tensor_frees_the_memory_from_any_thread(driver):
    pool = pool_of(driver)
    pool.commit(1)
    late = [pool.planes()[2]]
    late[0][:1] = 3.0
    assert pool.close() is False
    assert float(late[0][:1].float().mean()) == 3.0
    thread = threading.Thread(target=late.clear)
    thread.start()
    thread.join()
    deadline = time.monotonic() + 5
    while driver.live_handles and time.monotonic() < deadline:
        time.sleep(0.01)
    assert driver.live_handles == 0
