"""The CUDA driver's logic without a GPU: failing calls, sharing refused, waiting before unmapping."""

import contextlib
import logging
import os
import random
import threading

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.memory.vmm_cuda import CudaVmm
from tests.support.fake_cuda import GRANULE, FakeCuda, Result

LAYERS = [KVLayer(kv_heads=1, k_size=64, v_size=64), KVLayer(kv_heads=1, k_size=64, v_size=32)]
BLOCK_BYTES = 16 * 64 * 4  # a plane of 64 float32 values: 16 blocks in a granule
MEMORY_CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize")


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def driver_of(cuda: FakeCuda, **named) -> CudaVmm:
    return CudaVmm("cpu", api=cuda, **named)


def pool_of(driver: CudaVmm, **named) -> KVPool:
    return KVPool(LAYERS, torch.float32, 16, 200, driver, step_bytes=1 << 20, **named)


def holds_nothing(cuda: FakeCuda, driver: CudaVmm) -> bool:
    return (cuda.host.live_handles, cuda.host.physical_bytes, driver.live_handles) == (0, 0, 0)


def test_growth_keeps_base_bytes_and_views_and_new_memory_is_zeroed(cuda):
    driver = driver_of(cuda)
    buffer = ElasticBuffer(driver, 2, 5 * GRANULE, extent_bytes=2 * GRANULE)
    buffer.grow(GRANULE)
    view = buffer.segment(1)
    assert int(view[:GRANULE].min()) == 0xAB  # what the device gave
    view[:GRANULE] = 7
    buffer.grow(5 * GRANULE, zero_new=True)
    assert buffer.segment(1).data_ptr() == view.data_ptr() == buffer.base + 5 * GRANULE
    assert (int(view[:GRANULE].min()), int(view[GRANULE:].max())) == (7, 0)
    assert driver.is_mapped(buffer.base)
    buffer.shrink(0)
    assert not driver.is_mapped(buffer.base)
    assert holds_nothing(cuda, driver)


@pytest.mark.parametrize("name", MEMORY_CALLS)
def test_a_call_that_fails_in_the_middle_of_the_layers_is_undone_and_a_retry_works(cuda, name):
    driver = driver_of(cuda)
    pool = pool_of(driver)
    pool.commit(16)
    pool.planes()[0][:16] = 3.0
    held, mapped = cuda.host.physical_bytes, driver.live_handles
    before = cuda.count(name)
    pool.commit(64)
    calls = cuda.count(name) - before
    pool.shrink(16)
    assert calls >= 3
    for k in range(1, calls + 1):
        cuda.fail(name, k)
        with pytest.raises(VmmError, match=f"{name}.* failed: CUDA_ERROR_INVALID_VALUE"):
            pool.commit(64)
        cuda.heal()
        pool.check()
        pool.shrink(16)
        assert (pool.committed_blocks, driver.live_handles, cuda.host.physical_bytes) == (16, mapped, held)
    assert pool.commit(64) == 64
    assert float(pool.planes()[0][:16].min()) == 3.0
    assert all(int(plane[16:64].count_nonzero()) == 0 for plane in pool.planes())
    assert pool.close()
    assert holds_nothing(cuda, driver)


def test_a_full_device_stops_growth_with_the_size_in_the_reason_and_nothing_is_lost(cuda):
    driver = driver_of(cuda)
    pool = pool_of(driver)
    pool.commit(16)
    cuda.total = cuda.host.physical_bytes + 2 * GRANULE  # two of the four planes could grow
    assert pool.commit(17) == 16
    assert pool.stopped_by == "cuMemCreate of 0.0625 MiB failed: CUDA_ERROR_OUT_OF_MEMORY (2)"
    pool.check()
    cuda.total = 1 << 40  # somebody has freed memory
    assert pool.commit(17) == 32
    assert pool.stopped_by is None


@pytest.mark.parametrize("name", ["cuMemUnmap", "cuMemRelease", "cuEventSynchronize"])
def test_taking_memory_away_can_fail_and_is_made_good_by_the_next_call(cuda, name):
    driver = driver_of(cuda)
    driver.order_after(9)
    pool = pool_of(driver)
    for k in range(1, 4):
        pool.commit(64)
        cuda.fail(name, k)
        with pytest.raises(VmmError, match=name):
            pool.shrink(0)
        pool.check()
        assert pool.shrink(0) == 0
        assert holds_nothing(cuda, driver)


def test_an_event_behind_the_last_kernel_is_waited_for_before_the_first_unmap(cuda):
    driver = driver_of(cuda)
    driver.order_after(9)
    buffer = ElasticBuffer(driver, 1, 4 * GRANULE, extent_bytes=GRANULE)
    buffer.grow(4 * GRANULE)
    cuda.calls.clear()
    buffer.shrink(2 * GRANULE)
    assert cuda.calls == [
        "cuStreamIsCapturing",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuEventDestroy",
        *["cuMemUnmap"] * 2,
        *["cuMemRelease"] * 2,
    ]


def test_without_a_stream_the_whole_device_is_waited_for(cuda):
    driver_of(cuda).quiesce()
    assert cuda.calls[-1] == "cuCtxSynchronize"


def test_nothing_is_unmapped_while_a_graph_is_captured(cuda):
    driver = driver_of(cuda)
    driver.order_after(9)
    buffer = ElasticBuffer(driver, 1, GRANULE, extent_bytes=GRANULE)
    buffer.grow(GRANULE)
    cuda.capturing = True
    with pytest.raises(VmmError, match="while a graph is captured"):
        buffer.shrink(0)
    assert (buffer.committed_bytes, cuda.count("cuMemUnmap")) == (GRANULE, 0)
    assert cuda.count("cuEventDestroy") == cuda.count("cuEventCreate")


def test_random_growth_and_shrinking_with_failing_calls_keeps_the_books(cuda):
    driver = driver_of(cuda)
    pool = pool_of(driver)
    choose = random.Random(1)
    for _ in range(300):
        target = choose.randrange(0, 200)
        if choose.random() < 0.5:
            cuda.fail(choose.choice([*MEMORY_CALLS, "cuMemUnmap", "cuMemRelease"]), choose.randrange(1, 9))
        with contextlib.suppress(VmmError):
            pool.commit(target) if choose.random() < 0.5 else pool.shrink(target)
        cuda.heal()
        pool.check()
    pool.shrink(0)
    assert holds_nothing(cuda, driver)


@pytest.mark.parametrize(
    ("attributes", "refused", "expected", "says"),
    [
        ((102, 110), [], (True, True), None),
        ((102,), [], (True, False), "not be read by RDMA"),
        ((102, 110), [(True, True)], (True, False), "RDMA=True cannot be made"),
        ((102, 110), [(True, True), (True, False)], (False, False), "cannot be shared"),
    ],
)
def test_sharing_falls_back_with_a_warning(cuda, caplog, attributes, refused, expected, says):
    cuda.attributes, cuda.refused_properties = attributes, refused
    driver = driver_of(cuda, shareable=True)
    with caplog.at_level(logging.WARNING):
        assert (driver.is_shareable, driver.is_rdma_capable) == expected
    assert says is None or says in caplog.text
    assert (says is None) == (caplog.text == "")
    handle = driver.create(GRANULE)
    if driver.is_shareable:
        fd = driver.export_fd(handle)
        assert driver.import_fd(fd, GRANULE) == handle  # our own memory: one handle, released once
        os.close(fd)
    else:
        with pytest.raises(VmmError, match="not shareable"):
            driver.export_fd(handle)
    driver.release(handle)
    assert holds_nothing(cuda, driver)


def test_it_says_why_it_cannot_be_used(cuda):
    cuda.attributes = ()
    assert driver_of(cuda).unavailable_reason() == "cpu has no virtual memory management"
    cuda.attributes = (102,)
    cuda.fail("cuInit", result=Result.CUDA_ERROR_NOT_SUPPORTED)
    driver = driver_of(cuda)
    assert driver.unavailable_reason() == "cuInit failed: CUDA_ERROR_NOT_SUPPORTED (801)"
    assert driver.unavailable_reason() is None  # it may come to life
    if not torch.cuda.is_available():
        assert CudaVmm().unavailable_reason() == "torch sees no CUDA device (asked for cuda:0)"


def test_every_thread_gets_the_context_once(cuda):
    driver = driver_of(cuda)
    driver.release(driver.create(GRANULE))
    before = cuda.count("cuCtxSetCurrent")
    thread = threading.Thread(target=lambda: driver.release(driver.create(GRANULE)))
    thread.start()
    thread.join()
    assert cuda.count("cuCtxSetCurrent") == before + 1


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda d, base, h: d.reserve(GRANULE + 1), "multiple of the granularity"),
        (lambda d, base, h: d.map(base, GRANULE, h + 1000), "not a live handle"),
        (lambda d, base, h: d.map(base + GRANULE, 2 * GRANULE, h), "map all of it"),
        (lambda d, base, h: d.map(base, GRANULE, h), "mapped there already"),
        (lambda d, base, h: d.set_access(base, 2 * GRANULE), "whole mappings"),
        (lambda d, base, h: d.unmap(base, 2 * GRANULE), "no mapping of that address"),
        (lambda d, base, h: d.free_reserved(base, 4 * GRANULE), "1 mappings are still in it"),
    ],
)
def test_misuse_is_an_error_and_changes_nothing(cuda, misuse, says):
    driver = driver_of(cuda)
    base, handle = driver.reserve(4 * GRANULE), driver.create(GRANULE)
    driver.map(base, GRANULE, handle)
    driver.set_access(base, GRANULE)
    with pytest.raises(VmmError, match=says):
        misuse(driver, base, handle)
    assert driver.mapped_bytes(base, 4 * GRANULE) == GRANULE
    driver.unmap(base, GRANULE)
    driver.release(handle)
    driver.free_reserved(base, 4 * GRANULE)
    assert holds_nothing(cuda, driver)


def test_a_forked_child_may_not_touch_the_memory_of_its_parent(cuda, monkeypatch):
    driver = driver_of(cuda)
    handle = driver.create(GRANULE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        for call in (lambda: driver.release(handle), lambda: driver.create(GRANULE), driver.quiesce):
            with pytest.raises(VmmError, match="forked child"):
                call()
    driver.release(handle)


def test_the_device_full_error_of_a_reservation_is_out_of_memory(cuda):
    driver = driver_of(cuda)
    cuda.fail("cuMemAddressReserve", result=Result.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(VmmOutOfMemory, match=r"cuMemAddressReserve of 0\.125 MiB"):
        driver.reserve(2 * GRANULE)
