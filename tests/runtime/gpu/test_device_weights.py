"""Weights in elastic memory, here the host's: read, verified, given back, had again at the same place."""

import shutil

import pytest
import torch

from ostinato.errors import ArtifactError, EngineError
from ostinato.runtime.file_hash import hash_file
from ostinato.runtime.gpu import device_weights
from ostinato.runtime.gpu.device_weights import DeviceWeights
from ostinato.runtime.memory.memory_limits import MemoryLimits, MemoryState
from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory
from ostinato.runtime.weight_pack import pack
from tests.support.faulty_driver import FaultyDriver, ModelVmm

TENSORS = {"a": torch.randn(30, 17), "b": torch.arange(5000.0).bfloat16(), "mask": torch.ones(3, 3).bool()}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(device_weights, "PIECE_BYTES", 4096)  # several pieces, each on a thread
    monkeypatch.setattr("ostinato.runtime.file_hash.PIECE_BYTES", 4096)
    out = tmp_path / "weights"
    pack({name: ("load", name) for name in TENSORS}, TENSORS.__getitem__, out)
    return out


@pytest.fixture
def driver():
    return FaultyDriver(ModelVmm(4096))


@pytest.fixture
def weights(path, driver):
    made = DeviceWeights(path, driver, extent_bytes=8192)
    assert made.fill() == hash_file(path)
    yield made
    made.close()


def assert_whole(weights, addresses=None):
    tensors = weights.tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        name: tensor.dtype for name, tensor in TENSORS.items()
    }
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    if addresses is not None:
        assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses


def addresses_of(weights):
    return {name: tensor.data_ptr() for name, tensor in weights.tensors().items()}


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_the_same_at_the_same_addresses_after_five_sleeps(weights, driver, level):
    addresses = addresses_of(weights)
    for _ in range(5):
        weights.sleep(level)
        assert weights.resident_bytes == driver.inner.physical_bytes == 0
        weights.wake()
        assert_whole(weights, addresses)
        assert weights.resident_bytes >= weights.bytes


def test_level_one_needs_no_file_and_level_two_names_a_missing_or_changed_one(weights, path):
    kept = path.with_name("kept")
    weights.sleep(1)
    shutil.move(path, kept)
    weights.wake()
    assert_whole(weights)
    weights.sleep(2)
    with pytest.raises(ArtifactError, match="No such file"):
        weights.wake()
    raw = bytearray(kept.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match="not the weights that the engine started with"):
        weights.wake()
    path.write_bytes(raw[:-100])
    with pytest.raises(ArtifactError, match="it ends at byte"):
        weights.wake()
    assert weights.resident_bytes == 0
    shutil.move(kept, path)
    weights.wake()
    assert_whole(weights)


def test_level_two_after_level_one_drops_the_copy(weights):
    weights.sleep(1)
    assert weights._copy is not None
    weights.sleep(2)
    assert weights._copy is None
    weights.wake()
    assert_whole(weights)


def test_a_copy_that_finds_no_room_leaves_everything_as_it_was(weights, monkeypatch):
    monkeypatch.setattr(MemoryLimits, "available", lambda self: 100)
    with pytest.raises(EngineError, match=r"host memory.*or sleep at level 2"):
        weights.sleep(1)
    assert_whole(weights)
    weights.sleep(2)
    weights.wake()
    assert_whole(weights)


def test_a_copy_leaves_a_gibibyte_of_host_memory_to_others(weights, monkeypatch):
    free = [(1 << 30) + weights.bytes - 1]
    monkeypatch.setattr(MemoryLimits, "read", lambda self: MemoryState(1 << 40, free[0], "test"))
    with pytest.raises(EngineError, match=r"may be taken \(1024 MiB stay free\)"):
        weights.sleep(1)
    free[0] += 1
    weights.sleep(1)
    weights.wake()
    assert_whole(weights)


def test_a_driver_that_keeps_the_memory_leaves_the_weights_awake(weights, driver):
    driver.arm(1, keeps_failing=True)
    with pytest.raises(VmmError):
        weights.sleep(1)
    driver.heal()
    assert weights._copy is None
    assert_whole(weights)


def test_waking_works_later_though_the_driver_kept_the_memory_of_a_wake_that_failed(
    weights, driver, path, monkeypatch
):
    addresses, right = addresses_of(weights), path.read_bytes()
    weights.sleep(2)
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with monkeypatch.context() as stubborn:

        def unmap(*_):
            raise VmmError("unmap: refused")

        stubborn.setattr(driver.inner, "unmap", unmap)
        with pytest.raises(ArtifactError, match="not the weights that the engine started with"):
            weights.wake()
    assert weights.resident_bytes == driver.inner.physical_bytes > 0
    path.write_bytes(right)
    weights.wake()
    assert_whole(weights, addresses)


@pytest.mark.parametrize("level", [1, 2])
def test_waking_without_memory_is_refused_and_works_later(weights, driver, level):
    weights.sleep(level)
    driver.arm(1, keeps_failing=True, error=VmmOutOfMemory)
    with pytest.raises(VmmOutOfMemory):
        weights.wake()
    driver.heal()
    assert weights.resident_bytes == 0
    weights.wake()
    assert_whole(weights)
