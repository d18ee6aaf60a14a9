"""Growth in place: geometry against brute force, contents, failures of every driver call, random runs."""

import gc
import logging
import random

import pytest
import torch

from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.memory.vmm_host import HostVmm
from tests.support.faulty_driver import FaultyDriver, ModelVmm

MIB = 1 << 20


def granules_needed(segments: int, capacity: int, committed: int, granule: int) -> set[int]:
    """Every granule in which a committed byte lies, byte ranges taken one by one."""
    return {
        g
        for s in range(segments)
        if committed
        for g in range(s * capacity // granule, (s * capacity + committed - 1) // granule + 1)
    }


def granules_mapped(driver: ModelVmm, buffer: ElasticBuffer) -> set[int]:
    assert driver.accessible == set(driver.mapped)
    return {(address - buffer.base) // driver.granularity for address in driver.mapped}


def fill(buffer: ElasticBuffer, seed: int) -> list[torch.Tensor]:
    """Write random bytes into all committed memory and return copies."""
    copies = []
    for s in range(buffer.segments):
        view = buffer.segment(s)[: buffer.committed_bytes]
        view.copy_(torch.randint(0, 256, view.shape, generator=torch.Generator().manual_seed(seed + s)))
        copies.append(view.clone())
    return copies


def holds(buffer: ElasticBuffer, copies: list[torch.Tensor], size: int) -> bool:
    return all(torch.equal(buffer.segment(s)[:size], copy[:size]) for s, copy in enumerate(copies))


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "capacity", [3, 4, 10, 13, 16]
)  # granule 4: smaller than it, equal, straddling, even
def test_exactly_the_granules_that_are_needed_are_mapped_and_each_once(segments, capacity):
    driver = ModelVmm(4)
    for committed in range(capacity + 1):
        buffer = ElasticBuffer(driver, segments, capacity, extent_bytes=4)
        buffer.grow(committed // 2)
        buffer.grow(committed)
        needed = granules_needed(segments, capacity, committed, 4)
        assert granules_mapped(driver, buffer) == needed
        assert buffer.physical_bytes == 4 * len(needed) == 4 * buffer.num_extents
        buffer.check()
        buffer.shrink(committed // 3)
        assert granules_mapped(driver, buffer) == granules_needed(segments, capacity, committed // 3, 4)
        assert buffer.close()
    assert (driver.created, driver.physical_bytes, driver.reservations) == (driver.released, 0, {})


def test_growth_keeps_address_and_bytes_and_a_view_sees_the_new_memory():
    buffer = ElasticBuffer(HostVmm(4096), 2, 10_000)
    buffer.grow(1_000)
    view, address = buffer.segment(1), buffer.segment(1).data_ptr()
    assert address == buffer.base + 10_000
    view[:1_000] = 5
    for size in (1_001, 4_096, 9_999, 10_000):
        buffer.grow(size)
    assert (buffer.segment(1).data_ptr(), buffer.base + 10_000) == (address, address)
    view[1_000:] = 6
    assert (int(view[:1_000].sum()), int(view.sum())) == (5_000, 59_000)
    assert int(buffer.segment(0)[: buffer.capacity_bytes].max()) == 0
    buffer.check()


@pytest.mark.parametrize("driver", [ModelVmm(4), HostVmm(4096)], ids=["garbage", "zeroed"])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_new_bytes_are_zero_on_request_whatever_was_there(driver, segments):
    granule = driver.granularity
    capacity = 10 * granule + granule // 2
    buffer = ElasticBuffer(driver, segments, capacity, extent_bytes=3 * granule)
    sizes = random.Random(segments)
    for turn in range(40):
        size = sizes.randrange(buffer.committed_bytes, capacity + 1)
        before = [buffer.segment(s)[: buffer.committed_bytes].clone() for s in range(segments)]
        old = buffer.committed_bytes
        buffer.grow(size, zero_new=True)
        assert holds(buffer, before, old)
        assert all(int(buffer.segment(s)[old:size].count_nonzero()) == 0 for s in range(segments))
        kept = fill(buffer, turn)
        size = sizes.randrange(size + 1)
        buffer.shrink(size)
        assert holds(buffer, kept, size)


def test_without_the_request_new_memory_may_hold_anything():
    buffer = ElasticBuffer(ModelVmm(4), 1, 8)
    buffer.grow(8)
    assert int(buffer.segment(0).min()) == 0xAB


def test_shrinking_gives_back_whole_extents_and_growth_uses_the_rest():
    driver = FaultyDriver(ModelVmm(4))
    buffer = ElasticBuffer(driver, 1, 400, extent_bytes=40)
    buffer.grow(100)
    assert (buffer.num_extents, buffer.physical_bytes) == (3, 100)
    buffer.shrink(41)
    assert (buffer.num_extents, buffer.physical_bytes, buffer.committed_bytes) == (2, 80, 41)
    assert (buffer.bytes_to_grow(80), buffer.bytes_to_grow(81)) == (0, 4)
    buffer.grow(80)
    assert driver.counts["create"] == 3
    buffer.shrink(0)
    assert (buffer.physical_bytes, driver.counts["release"]) == (0, 3)
    buffer.grow(4)
    assert buffer.physical_bytes == 4
    buffer.check()


def test_released_memory_comes_back_at_the_same_address_as_zeros():
    buffer = ElasticBuffer(ModelVmm(4), 2, 10)
    buffer.grow(9)
    fill(buffer, 1)
    view, address = buffer.segment(1), buffer.base
    buffer.release_physical()
    assert (buffer.physical_bytes, buffer.committed_bytes, buffer.is_released) == (0, 9, True)
    buffer.check()
    buffer.recommit()
    assert (buffer.base, int(view[:9].max()), buffer.is_released) == (address, 0, False)
    buffer.check()


def test_defragment_leaves_one_extent_per_segment_and_zeros():
    buffer = ElasticBuffer(ModelVmm(4), 2, 22, extent_bytes=4)
    for size in range(0, 20, 3):
        buffer.grow(size)
    fill(buffer, 1)
    assert buffer.num_extents == 10
    buffer.defragment()
    assert (buffer.num_extents, buffer.committed_bytes, buffer.physical_bytes) == (2, 18, 40)
    assert all(int(buffer.segment(s)[:18].max()) == 0 for s in range(2))
    buffer.grow(22)
    buffer.check()


def test_narrowed_views_end_with_the_committed_bytes():
    buffer = ElasticBuffer(HostVmm(4096), 2, 10_000)
    buffer.grow(5_000)
    view = buffer.narrowed(1)
    assert (view.data_ptr(), view.numel()) == (buffer.base + 10_000, 5_000)
    assert view.untyped_storage().nbytes() == 5_000
    single = ElasticBuffer(HostVmm(4096), 1, 10_000)
    assert single.prefix().numel() == 0
    single.grow(10)
    assert (single.prefix().data_ptr(), single.prefix().numel()) == (single.base, 10)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda b: b.grow(7), r"grow\(7\): 8 bytes are committed already; shrink"),
        (lambda b: b.grow(11), r"grow\(11\): only 10 bytes are reserved"),
        (lambda b: b.shrink(9), r"shrink\(9\): must be 0 to 8"),
        (lambda b: b.shrink(-1), r"shrink\(-1\): must be 0 to 8"),
        (lambda b: b.recommit(), "nothing was released"),
        (lambda b: b.prefix(), "2 segments are apart"),
        (lambda b: b.segment(2), "segments 0 to 1"),
        (lambda b: b.narrowed(-1), "segments 0 to 1"),
    ],
)
def test_misuse_is_a_value_error_that_says_why(misuse, says):
    buffer = ElasticBuffer(ModelVmm(4), 2, 10)
    buffer.grow(8)
    with pytest.raises(ValueError, match=says):
        misuse(buffer)
    assert buffer.committed_bytes == 8
    buffer.check()


@pytest.mark.parametrize(
    "verb", ["grow", "shrink", "prefix", "narrowed", "segment", "release_physical", "defragment"]
)
def test_verbs_are_refused_while_released_or_closed(verb):
    buffer = ElasticBuffer(ModelVmm(4), 1, 10)
    arguments = [0] if verb in ("grow", "shrink", "narrowed", "segment") else []
    buffer.release_physical()
    if verb in ("grow", "shrink", "prefix", "narrowed"):
        with pytest.raises(ValueError, match="call recommit first"):
            getattr(buffer, verb)(*arguments)
    buffer.recommit()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        getattr(buffer, verb)(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((0, 10, 4), "segments=0"), ((1, 0, 4), "segment_capacity_bytes=0"), ((1, 10, 6), "extent_bytes=6")],
)
def test_impossible_sizes_are_refused(arguments, says):
    segments, capacity, extent = arguments
    with pytest.raises(ValueError, match=says):
        ElasticBuffer(ModelVmm(4), segments, capacity, extent_bytes=extent)


def scene(driver: FaultyDriver) -> tuple[ElasticBuffer, list[torch.Tensor]]:
    buffer = ElasticBuffer(driver, 2, 22, extent_bytes=8)
    buffer.grow(3)
    buffer.grow(14)
    return buffer, fill(buffer, 1)


OPERATIONS = {  # name -> (operation, committed bytes after it)
    "grow": (lambda b: b.grow(22), 22),
    "grow with zeros": (lambda b: b.grow(20, zero_new=True), 20),
    "shrink": (lambda b: b.shrink(2), 2),
    "shrink to nothing": (lambda b: b.shrink(0), 0),
    "release": (lambda b: b.release_physical(), 14),
    "release and recommit": (lambda b: (b.release_physical(), b.recommit()), 14),
    "defragment": (lambda b: b.defragment(), 14),
}


def calls_of(name: str) -> int:
    driver = FaultyDriver(ModelVmm(4))
    buffer, _ = scene(driver)
    before = driver.counts.total()
    OPERATIONS[name][0](buffer)
    return driver.counts.total() - before


@pytest.mark.parametrize("keeps_failing", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_failure_of_any_driver_call_is_undone_and_a_retry_works(name, keeps_failing):
    operation, after = OPERATIONS[name]
    calls = calls_of(name)
    assert calls >= 5
    for k in range(1, calls + 1):
        driver = FaultyDriver(ModelVmm(4))
        model = driver.inner
        buffer, content = scene(driver)
        driver.arm(k, keeps_failing=keeps_failing)
        with pytest.raises(VmmError, match="made to fail"):
            operation(buffer)
        buffer.check()
        assert buffer.committed_bytes in (14, after) or keeps_failing
        assert buffer.physical_bytes == model.physical_bytes
        driver.heal()
        if not buffer.is_released and "defragment" not in name and "recommit" not in name:
            assert holds(buffer, content, min(buffer.committed_bytes, 14, after or 14))
        if buffer.is_released:
            buffer.recommit()
        elif buffer.committed_bytes > after or "shrink" not in name:
            operation(buffer)
        if buffer.is_released:
            buffer.recommit()
        buffer.shrink(min(buffer.committed_bytes, 2))
        buffer.grow(22)
        assert granules_mapped(model, buffer) == granules_needed(2, 22, 22, 4)
        buffer.check()
        assert buffer.close()
        assert (model.created, model.physical_bytes, model.reservations) == (model.released, 0, {})


def test_a_failed_growth_changes_nothing():
    for k in range(1, calls_of("grow") + 1):
        driver = FaultyDriver(ModelVmm(4))
        buffer, content = scene(driver)
        mapped, physical = granules_mapped(driver.inner, buffer), buffer.physical_bytes
        driver.arm(k, error=VmmOutOfMemory)
        with pytest.raises(VmmOutOfMemory):
            buffer.grow(22)
        assert (granules_mapped(driver.inner, buffer), buffer.physical_bytes) == (mapped, physical)
        assert buffer.committed_bytes == 14
        assert holds(buffer, content, 14)


def test_growth_that_cannot_be_zeroed_is_undone_and_recommit_then_holds_nothing():
    driver = FaultyDriver(ModelVmm(4))
    buffer, content = scene(driver)
    mapped = granules_mapped(driver.inner, buffer)
    buffer.grow(22, zero_new=True)
    at = driver.calls.index("zero") + 1
    driver = FaultyDriver(ModelVmm(4))
    buffer, content = scene(driver)
    before = len(driver.calls)
    driver.arm(at - before)
    with pytest.raises(VmmError, match="zero: made to fail"):
        buffer.grow(22, zero_new=True)
    assert granules_mapped(driver.inner, buffer) == mapped
    assert (buffer.committed_bytes, buffer.physical_bytes) == (14, driver.inner.physical_bytes)
    assert holds(buffer, content, 14)
    buffer.release_physical()
    probe = len(driver.calls)
    buffer.recommit()
    at = driver.calls.index("zero", probe) - probe + 1
    buffer.release_physical()
    driver.arm(at)
    with pytest.raises(VmmError, match="zero: made to fail"):
        buffer.recommit()
    assert (buffer.is_released, driver.inner.physical_bytes) == (True, 0)
    buffer.recommit()
    assert not buffer.segment(0)[:14].any()


def test_a_failed_unmap_puts_back_what_was_unmapped_with_its_bytes():
    driver = FaultyDriver(ModelVmm(4))
    buffer, content = scene(driver)
    mapped = granules_mapped(driver.inner, buffer)
    driver.arm(4)  # quiesce, unmap, unmap, unmap
    with pytest.raises(VmmError, match="unmap: made to fail"):
        buffer.shrink(0)
    assert (buffer.committed_bytes, granules_mapped(driver.inner, buffer)) == (14, mapped)
    assert holds(buffer, content, 14)


def test_what_cannot_be_put_back_is_lost_but_the_books_say_so():
    driver = FaultyDriver(ModelVmm(4))
    buffer, content = scene(
        driver
    )  # segment 0: granules 0, 1-2, 3; all but the map that follows a failure succeed
    driver.arm(4, 5)
    with pytest.raises(VmmError, match="unmap: made to fail"):
        buffer.shrink(0)
    assert driver.calls[-7:].count("map") == 1  # behind a lost extent nothing can follow
    assert buffer.committed_bytes < 14
    assert holds(buffer, content, buffer.committed_bytes)
    assert buffer.physical_bytes == driver.inner.physical_bytes
    buffer.check()
    buffer.grow(22)
    buffer.check()
    assert holds(buffer, content, 4)


def test_the_device_is_quiet_before_anything_is_unmapped():
    driver = FaultyDriver(ModelVmm(4))
    buffer, _ = scene(driver)
    for operation in (lambda: buffer.shrink(2), buffer.release_physical, buffer.close):
        driver.calls.clear()
        operation()
        assert driver.calls[:2] == ["quiesce", "unmap"]
        if buffer.is_released:
            buffer.recommit()


def test_a_full_device_is_an_out_of_memory_error_and_nothing_is_kept():
    driver = ModelVmm(4, limit=40)
    buffer = ElasticBuffer(driver, 2, 100, extent_bytes=4)
    buffer.grow(12)
    with pytest.raises(VmmOutOfMemory, match="device is full"):
        buffer.grow(40)
    assert (driver.physical_bytes, buffer.committed_bytes) == (24, 12)
    buffer.grow(20)
    assert driver.physical_bytes == 40


@pytest.mark.parametrize("segments", [1, 3])
def test_random_steps_equal_the_model(segments):  # 10^5 in all
    driver = ModelVmm(4, has_bytes=False)
    buffer = ElasticBuffer(driver, segments, 101, extent_bytes=4)
    rng = random.Random(segments)
    for step in range(50_000):
        size = rng.randrange(102) if rng.random() < 0.1 else buffer.committed_bytes + rng.randrange(-9, 10)
        size = min(max(size, 0), 101)
        (buffer.grow if size > buffer.committed_bytes else buffer.shrink)(size)
        needed = len(driver.mapped)
        assert buffer.physical_bytes == driver.physical_bytes == 4 * needed
        if step % 50 == 0:
            assert granules_mapped(driver, buffer) == granules_needed(segments, 101, size, 4)
            buffer.check()
    assert buffer.close()
    assert (driver.created, driver.reservations) == (driver.released, {})


def test_tensors_outlive_the_buffer_and_the_last_one_frees_the_memory():
    driver = HostVmm(4096)
    buffer = ElasticBuffer(driver, 2, MIB)
    buffer.grow(MIB)
    view = buffer.segment(1)[10:20].view(torch.int16)
    view.fill_(3)
    assert buffer.close() is False
    assert (int(view.sum()), driver.physical_bytes) == (15, 2 * MIB)
    del view
    assert driver.physical_bytes == 0
    assert buffer.close() is True


def test_a_forgotten_buffer_is_freed():
    driver = HostVmm(4096)
    ElasticBuffer(driver, 1, MIB).grow(MIB)
    gc.collect()
    assert driver.live_handles == 0


def test_memory_that_cannot_be_given_back_is_reported_and_not_raised(caplog):
    driver = FaultyDriver(ModelVmm(4))
    buffer, _ = scene(driver)
    driver.arm(1, keeps_failing=True)
    with caplog.at_level(logging.WARNING):
        buffer.close()
    assert "could not be given back: quiesce: made to fail" in caplog.text
