"""The fallback driver: one plain allocation, and a warning that says why."""

import logging

import pytest
import torch

from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.memory.vmm_host import HostVmm
from ostinato.runtime.memory.vmm_plain import PlainVmm, usable_driver


def test_a_usable_driver_is_taken_as_it_is(caplog):
    driver = HostVmm()
    assert usable_driver(driver) is driver
    assert not caplog.records


def test_an_unusable_driver_is_replaced_with_a_warning_that_names_the_reason(caplog, monkeypatch):
    driver = HostVmm()
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "it needs Linux")
    with caplog.at_level(logging.WARNING):
        plain = usable_driver(driver)
    assert isinstance(plain, PlainVmm)
    assert "cannot grow or shrink: it needs Linux" in caplog.text


def test_a_buffer_works_on_it_and_costs_its_capacity_from_the_start():
    driver = PlainVmm()
    buffer = ElasticBuffer(driver, 2, 10_000, extent_bytes=4096)
    assert buffer.physical_bytes == 5 * 4096
    buffer.grow(6_000, zero_new=True)
    view = buffer.segment(1)
    view[:6_000] = 7
    buffer.shrink(100)
    buffer.grow(6_000, zero_new=True)
    assert (int(view[:100].min()), int(view[100:6_000].max())) == (7, 0)
    buffer.release_physical()
    buffer.recommit()
    assert int(view[:6_000].max()) == 0
    buffer.check()
    assert buffer.close()
    assert driver.live_handles == 0
    assert int(view[:100].max()) == 0  # a tensor that outlives the buffer is an ordinary tensor


def test_too_much_is_an_error_at_once():
    with pytest.raises(VmmOutOfMemory, match="on cpu failed"):
        PlainVmm().reserve(1 << 60)


def test_misuse_is_an_error():
    driver = PlainVmm()
    base = driver.reserve(8192)
    handle = driver.create(4096)
    driver.map(base, 4096, handle)
    for misuse in (
        lambda: driver.map(base, 4096, handle),
        lambda: driver.map(base + 4096, 8192, handle),
        lambda: driver.unmap(base + 4096, 4096),
        lambda: driver.release(handle + 1),
        lambda: driver.free_reserved(base + 1, 8192),
        lambda: driver.tensor(base + 8192, 1, None),
    ):
        with pytest.raises(VmmError):
            misuse()
    assert driver.mapped_bytes(base, 8192) == 4096
    assert torch.equal(driver.tensor(base, 8192, None), torch.zeros(8192, dtype=torch.uint8))


def test_memory_of_a_gpu_is_zero_before_any_stream_can_use_it(monkeypatch):
    queued = []

    class Stream:
        def synchronize(self):
            for tensor in queued:
                tensor.zero_()
            queued.clear()

    def zeros(size, **_):
        queued.append(torch.full((size,), 7, dtype=torch.uint8))  # as the kernel that zeroes has not run yet
        return queued[-1]

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    driver = PlainVmm("cuda:0")
    base = driver.reserve(8192)
    assert not driver.tensor(base, 8192, None).any()
