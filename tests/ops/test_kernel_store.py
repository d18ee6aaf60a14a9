"""The store of compiled kernels: what an artifact keeps of it, and what a server refuses."""

import threading
from pathlib import Path

import pytest

from ostinato.errors import ArtifactError, EngineError
from ostinato.ops import kernel_store
from ostinato.ops.kernel_store import CUBINS, INDEX, Binary, KernelStore


def binary(key: str) -> Binary:
    return Binary(
        key=key, symbol="k", threads=128, shared=0, params=("ptr", "ptr"), launch_pdl=True, offset=0, size=0
    )


def never() -> tuple[Binary, bytes]:
    raise AssertionError("nothing is to be compiled")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_store, "capability_here", lambda: 90)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = KernelStore()
    for key, cubin in (("b", b"second"), ("a", b"first"), ("unused", b"third")):
        store.add(binary(key), cubin)
    assert store.write(tmp_path, ["b", "a"]) == 2
    return tmp_path


def test_a_sealed_store_gives_what_was_written_and_compiles_nothing(folder: Path) -> None:
    store = KernelStore()
    assert store.read(folder) == 2
    store.is_sealed = True
    assert (store.get("a", never)[1], store.get("b", never)[1]) == (b"first", b"second")
    with pytest.raises(EngineError, match="kernel variant unused is not in the artifact; compile the model"):
        store.get("unused", never)


def test_an_open_store_builds_a_variant_once() -> None:
    store, built = KernelStore(), []

    def build() -> tuple[Binary, bytes]:
        built.append("a")
        return binary("a"), b"code"

    assert store.get("a", build) == store.get("a", build)
    assert built == ["a"]


def test_a_recording_may_compile_in_a_sealed_store() -> None:
    store = KernelStore()
    store.is_sealed = True
    with store.recording():
        assert store.get("a", lambda: (binary("a"), b"code"))[1] == b"code"
    assert store.get("a", never)[1] == b"code"


def test_the_split_of_l1_is_that_of_the_thread_whose_step_runs() -> None:
    """Two engines of a process: the variants of wgmma_linear follow from it."""
    store = KernelStore()
    assert store.carveout == 100
    store.carveout = 50
    seen: list[int] = []

    def another_engine() -> None:
        seen.append(store.carveout)
        store.carveout = 75

    other = threading.Thread(target=another_engine)
    other.start()
    other.join()
    assert (seen, store.carveout) == ([100], 50)


def test_kernels_of_another_gpu_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_store, "capability_here", lambda: 80)
    with pytest.raises(ArtifactError, match="kernels for compute capability 90, this GPU has 80"):
        KernelStore().read(folder)


@pytest.mark.parametrize("name", [INDEX, CUBINS])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=r"No such file.*compile the model again"):
        KernelStore().read(folder)


def test_a_broken_index_is_an_artifact_error(folder: Path) -> None:
    (folder / INDEX).write_text('{"capability": 90, "binaries": [{"key": "a"}]}')
    with pytest.raises(ArtifactError, match=r"kernels\.json: binaries\.0\.symbol: Field required; compile"):
        KernelStore().read(folder)
