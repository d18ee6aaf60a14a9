"""What is begun before torch is imported, by the device that an artifact is for."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime import load_ahead
from ostinato.runtime.artifact_names import MANIFEST, WEIGHTS
from ostinato.runtime.file_hash import FileHashes, hash_file

FILES = (MANIFEST, WEIGHTS, "program.json", "tokenizer/tokenizer.json")


def artifact(folder: Path, manifest: str) -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name)
    (folder / MANIFEST).write_text(manifest)
    return folder


def of_device(device: str) -> str:
    return json.dumps({"target": {"device": device}})


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the contexts that were asked for."""
    made = threading.Semaphore(0)
    monkeypatch.setattr(load_ahead, "_make_context", made.release)
    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that are hashed ahead."""
    asked: list[Path] = []

    def hashes(paths: Any) -> FileHashes:
        asked.extend(paths)
        return FileHashes(asked)

    monkeypatch.setattr(load_ahead, "FileHashes", hashes)
    return asked


def test_all_files_of_an_artifact_for_a_processor_are_hashed(tmp_path: Path, contexts, hashed: list[Path]):
    folder = artifact(tmp_path / "made", of_device("cpu"))
    with load_ahead.load_ahead(folder) as digest:
        assert {path.relative_to(folder).as_posix() for path in hashed} == set(FILES)
        assert digest(folder / WEIGHTS) == hash_file(folder / WEIGHTS)
    assert not contexts.acquire(timeout=0.1)


def test_weights_for_a_gpu_are_left_out_and_a_context_is_made(tmp_path: Path, contexts, hashed: list[Path]):
    folder = artifact(tmp_path / "made", of_device("cuda"))
    with load_ahead.load_ahead(folder):
        assert {path.relative_to(folder).as_posix() for path in hashed} == set(FILES) - {WEIGHTS}
    assert contexts.acquire(timeout=10)


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{}", "[" * 100_000, '{"target": "cuda"}', '{"target": {"device": []}}']
)
def test_a_damaged_manifest_is_left_to_who_loads_it(tmp_path: Path, contexts, hashed, manifest: str):
    folder = artifact(tmp_path / "made", manifest)
    with load_ahead.load_ahead(folder):
        assert len(hashed) == len(FILES)
    assert not contexts.acquire(timeout=0.1)


@pytest.mark.parametrize("name", ["absent", "empty", "file"])
def test_what_is_no_artifact_has_no_files(tmp_path: Path, contexts, hashed: list[Path], name: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    with load_ahead.load_ahead(tmp_path / name):
        assert hashed == []
    assert not contexts.acquire(timeout=0.1)


class FakeDriver:
    """Notes the calls, of which one may fail."""

    def __init__(self, failing: str = "") -> None:
        self.called: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.called.append(name)
            return 100 if name == self._failing else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_the_primary_context_is_retained_and_a_failure_is_torchs_to_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: int
):
    driver = FakeDriver(CALLS[failing - 1] if failing < 3 else "")
    monkeypatch.setattr(load_ahead.ctypes, "CDLL", lambda name: driver)
    with caplog.at_level("DEBUG", load_ahead.log.name):
        load_ahead._make_context()
    assert driver.called == CALLS[:failing]
    assert [record.getMessage() for record in caplog.records] == (
        [] if failing == 3 else ["no context of the GPU ahead of torch: 100"]
    )


def test_without_a_driver_nothing_is_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(load_ahead.ctypes, "CDLL", absent)
    with caplog.at_level("DEBUG", load_ahead.log.name):
        load_ahead._make_context()
    assert "libcuda.so.1: cannot open" in caplog.text


def test_torch_is_not_imported_for_it():
    code = "import sys, ostinato.runtime.load_ahead; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
