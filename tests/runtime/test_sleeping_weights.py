"""Weights of a CPU, which are a mapped file, while an engine sleeps."""

import mmap

import pytest

from ostinato.errors import ArtifactError
from ostinato.runtime.file_hash import hash_file
from ostinato.runtime.sleeping_weights import MappedWeights

SIZE = 40 << 20  # three pieces of the hash


@pytest.fixture
def path(tmp_path):
    out = tmp_path / "weights"
    out.write_bytes(bytes(range(256)) * (SIZE // 256))
    return out


@pytest.fixture
def weights(path):
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        yield MappedWeights(memory, "weights", hash_file(path))


def test_level_one_keeps_the_pages_and_level_two_drops_and_verifies_them(weights):
    for level, resident in ((1, SIZE), (2, 0)):
        weights.sleep(level)
        assert weights.resident_bytes == resident
        weights.wake()
        assert weights.resident_bytes == SIZE


@pytest.mark.parametrize("change", ["content", "length"])
def test_a_file_that_has_changed_meanwhile_is_not_woken(weights, path, change):
    weights.sleep(2)
    with path.open("r+b") as file:
        if change == "content":
            file.write(b"!")
        else:
            file.truncate(SIZE // 2)
    with pytest.raises(ArtifactError, match="weights: the file has changed"):
        weights.wake()
    assert weights.resident_bytes == 0
    with path.open("r+b") as file:
        file.write(bytes(range(256)) * (SIZE // 256))
    weights.wake()
    assert weights.resident_bytes == SIZE
