"""The host driver: what it promises to `ElasticBuffer`, with real memory."""

import ctypes
import errno
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch

from ostinato.runtime.memory import vmm_host
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.memory.vmm_host import HostVmm

MIB = 1 << 20
G = 64 << 10

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd and fallocate are Linux")


def shmem_resident() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"RssShmem:\s+(\d+) kB", status.read())[1]) << 10


@pytest.fixture
def driver():
    driver = HostVmm(G)
    assert driver.unavailable_reason() is None
    yield driver
    assert (driver.live_handles, driver.physical_bytes) == (0, 0)


@pytest.fixture
def base(driver):
    address = driver.reserve(16 * MIB)
    yield address
    driver.free_reserved(address, 16 * MIB)


def put(driver: HostVmm, address: int, size: int) -> int:
    handle = driver.create(size, at=address)
    driver.map(address, size, handle)
    driver.set_access(address, size)
    return handle


def take(driver: HostVmm, address: int, size: int, handle: int) -> None:
    driver.unmap(address, size)
    driver.release(handle)


def test_a_tebibyte_of_addresses_costs_neither_time_nor_memory(driver):
    before, started = shmem_resident(), time.perf_counter()
    address = driver.reserve(1 << 40)
    view = driver.tensor(address, 1 << 40, None)
    assert (view.numel(), view.data_ptr(), address % (2 * MIB)) == (1 << 40, address, 0)
    driver.free_reserved(address, 1 << 40)
    assert time.perf_counter() - started < 1.0
    assert shmem_resident() - before < MIB


def test_new_memory_is_zero_and_writable(driver, base):
    handle = put(driver, base, MIB)
    view = driver.tensor(base, MIB, None)
    assert int(view.max()) == 0
    view.fill_(7)
    assert int(view.min()) == 7
    take(driver, base, MIB, handle)


def test_a_handle_keeps_its_bytes_when_it_moves_to_another_address(driver, base):
    handle = put(driver, base, G)
    driver.tensor(base, G, None).fill_(9)
    driver.unmap(base, G)
    driver.map(base + MIB, G, handle)
    driver.set_access(base + MIB, G)
    assert int(driver.tensor(base + MIB, G, None).min()) == 9
    take(driver, base + MIB, G, handle)


def test_two_mappings_of_a_handle_share_writes_and_the_memory_lives_until_both_are_gone(driver, base):
    handle = put(driver, base, G)
    driver.map(base + G, G, handle)
    driver.set_access(base + G, G)
    driver.tensor(base, G, None)[5] = 3
    driver.release(handle)
    driver.unmap(base, G)
    assert (int(driver.tensor(base + G, G, None)[5]), driver.physical_bytes) == (3, G)
    driver.unmap(base + G, G)
    assert driver.physical_bytes == 0


def test_memory_goes_back_to_the_system_and_comes_back_as_zeros(driver, base):
    handle = put(driver, base, 8 * MIB)
    driver.tensor(base, 8 * MIB, None).fill_(1)
    full = shmem_resident()
    take(driver, base, 8 * MIB, handle)
    assert full - shmem_resident() >= 7 * MIB
    handle = put(driver, base, 8 * MIB)
    assert int(driver.tensor(base, 8 * MIB, None).max()) == 0
    take(driver, base, 8 * MIB, handle)


def test_neighbouring_mappings_are_one_for_the_kernel(driver, base):
    handles = [put(driver, base + i * G, G) for i in range(16)]
    with open("/proc/self/maps") as maps:
        ranges = [line.split(" ")[0] for line in maps if "memfd:ostinato" in line]
    assert f"{base:x}-{base + 16 * G:x}" in ranges
    for i, handle in enumerate(handles):
        take(driver, base + i * G, G, handle)


def test_a_second_chunk_made_for_the_same_address_has_its_own_bytes(driver, base):
    first = put(driver, base, G)
    second = driver.create(G, at=base)
    driver.map(base + G, G, second)
    driver.set_access(base + G, G)
    driver.tensor(base, G, None).fill_(1)
    assert int(driver.tensor(base + G, G, None).max()) == 0
    third = driver.create(2 * G, at=base + 2 * G)
    fourth = put(driver, base + 3 * G, G)  # in the file its place is inside the third
    driver.tensor(base + 3 * G, G, None).fill_(2)
    driver.map(base + 4 * G, 2 * G, third)
    driver.set_access(base + 4 * G, 2 * G)
    assert int(driver.tensor(base + 4 * G, 2 * G, None).max()) == 0
    take(driver, base, G, first)
    take(driver, base + G, G, second)
    take(driver, base + 3 * G, G, fourth)
    take(driver, base + 4 * G, 2 * G, third)


def test_touching_memory_that_is_not_committed_ends_the_process():
    script = f"""
    import os, resource
    from ostinato.runtime.memory.vmm_host import HostVmm
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    G = {G}
    driver = HostVmm(G)
    base = driver.reserve(4 * G)
    view = driver.tensor(base, 4 * G, None)
    gone, kept = driver.create(G), driver.create(G)
    driver.map(base, G, kept), driver.set_access(base, G)
    driver.map(base + G, G, gone), driver.set_access(base + G, G)
    driver.unmap(base + G, G)
    driver.map(base + 2 * G, G, gone)
    for at in (0, G, 2 * G, 3 * G):
        child = os.fork()
        if not child:
            view[at] = 1
            os._exit(0)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
    """
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    signals = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    segv = str(int(signal.SIGSEGV))
    assert signals == ["0", segv, segv, segv]  # committed; unmapped; mapped without access; never mapped


def test_no_memory_left_is_an_error_when_it_is_asked_for_and_changes_nothing(driver):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (MIB, hard)
    )  # the memfd cannot become larger: stands for a full machine
    try:
        with pytest.raises(VmmOutOfMemory, match=r"fallocate of 1048576 bytes failed"):
            driver.create(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert driver.live_handles == 0


class InterruptedLibc:
    """libc whose every second fallocate is interrupted by a signal."""

    def __init__(self, libc):
        self.libc, self.calls = libc, 0

    def __getattr__(self, name):
        return getattr(self.libc, name)

    def fallocate(self, *arguments):
        self.calls += 1
        if self.calls % 2:
            ctypes.set_errno(errno.EINTR)
            return -1
        return self.libc.fallocate(*arguments)


def test_a_signal_during_allocation_is_no_error(driver, monkeypatch):
    libc = InterruptedLibc(vmm_host._LIBC)
    monkeypatch.setattr(vmm_host, "_LIBC", libc)
    driver.release(driver.create(4 * MIB))
    assert libc.calls == 10  # four pieces and a hole, each tried twice


def test_a_part_that_was_allocated_before_an_error_is_given_back(driver):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    base = driver.reserve(16 * MIB)
    held = os.fstat(driver._fd).st_blocks
    resource.setrlimit(resource.RLIMIT_FSIZE, (base + 3 * MIB, hard))
    try:
        with pytest.raises(VmmOutOfMemory):
            driver.create(8 * MIB, at=base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.fstat(driver._fd).st_blocks == held
    driver.free_reserved(base, 16 * MIB)


def test_no_addresses_left_is_an_error_that_names_the_limits(driver):
    with pytest.raises(VmmOutOfMemory, match="ulimit -v"):
        driver.reserve(1 << 60)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda d, base, h: d.reserve(G + 1), "multiple of the granularity"),
        (lambda d, base, h: d.create(0), "multiple of the granularity"),
        (lambda d, base, h: d.map(base, G, h + 1000), "not a live handle"),
        (lambda d, base, h: d.map(base + G, 2 * G, h), "map all of it"),
        (lambda d, base, h: d.map(base, G, h), "mapped there already"),
        (lambda d, base, h: d.set_access(base, 2 * G), "whole mappings"),
        (lambda d, base, h: d.unmap(base + G, G), "no mapping of that address"),
        (lambda d, base, h: d.unmap(base, 2 * G), "no mapping of that address"),
        (lambda d, base, h: d.release(h + 1000), "not a live handle"),
        (lambda d, base, h: d.free_reserved(base, 16 * MIB), "1 mappings are still in it"),
    ],
)
def test_misuse_is_an_error_and_changes_nothing(driver, base, misuse, says):
    handle = put(driver, base, G)
    with pytest.raises(VmmError, match=says):
        misuse(driver, base, handle)
    assert (driver.mapped_bytes(base, 16 * MIB), driver.live_handles) == (G, 1)
    take(driver, base, G, handle)


def test_a_handle_cannot_be_released_twice(driver, base):
    handle = put(driver, base, G)
    driver.release(handle)
    with pytest.raises(VmmError, match="not a live handle"):
        driver.release(handle)
    driver.unmap(base, G)


@pytest.mark.parametrize("granularity", [0, 1024, 3 * 4096])
def test_a_granularity_that_is_no_power_of_two_pages_is_refused(granularity):
    with pytest.raises(ValueError, match=f"granularity={granularity}"):
        HostVmm(granularity)


def test_a_forked_child_may_not_touch_the_memory_of_its_parent(driver, base, monkeypatch):
    handle = put(driver, base, G)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        for call in (
            lambda: driver.unmap(base, G),
            lambda: driver.release(handle),
            lambda: driver.create(G),
            lambda: driver.free_reserved(base, 16 * MIB),
        ):
            with pytest.raises(VmmError, match="forked child"):
                call()
    take(driver, base, G, handle)


def test_a_tensor_keeps_its_owner_alive_through_views(driver, base):
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    view = driver.tensor(base, G, owner)[3:].view(torch.int8)
    del owner
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_it_says_why_it_cannot_be_used(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert HostVmm().unavailable_reason() == "it needs Linux (memfd and fallocate), this is darwin"
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no")))
        assert "memfd_create failed" in HostVmm().unavailable_reason()
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1, 1))
        assert "ulimit -f" in HostVmm().unavailable_reason()
