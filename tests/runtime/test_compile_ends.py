"""How a compile ends: killed, ended by a signal, disk full, or two at once. Never half an artifact."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.errors import CompileError
from ostinato.runtime.artifact import load_artifact, read_manifest
from ostinato.runtime.compile import compile_model
from ostinato.runtime.sigterm import exits_on_sigterm
from tests.support.kernels import Prebuilt
from tests.support.server_process import ROOT
from tests.support.tiny_models import edit_json, make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def artifact(model, shared_kernels, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    compile_model(model, out)
    return out


@pytest.fixture(scope="module")
def start(model, shared_kernels: Prebuilt):
    """Starts a process that compiles; `body` runs in it at each news of progress (`stage`, `share`)."""

    def started(out: Path, body: str = "pass", source: Path = model) -> subprocess.Popen:
        code = f"""
import os, signal, resource
{shared_kernels.code}
from ostinato.runtime.compile import compile_model
def progress(stage, share):
    {body}
compile_model({str(source)!r}, {str(out)!r}, progress=progress)
"""
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)

    return started


def ends(*processes: subprocess.Popen) -> list[int]:
    """Wait for all; their return codes."""
    for process in processes:
        process.communicate()
    return [process.returncode for process in processes]


@pytest.fixture
def old(artifact, tmp_path) -> Path:
    """A good artifact that any compile wants to replace."""
    folder = Path(shutil.copytree(artifact, tmp_path / "old"))
    edit_json(folder / "manifest.json", key="of another compile")
    return folder


def test_kill_9_leaves_the_old_artifact_or_none_and_the_next_compile_cleans_up(model, old, start):
    kill = "stage == 'write' and os.kill(os.getpid(), signal.SIGKILL)"
    fresh = old.with_name("fresh")
    assert ends(start(fresh, kill), start(old, kill)) == [-signal.SIGKILL, -signal.SIGKILL]
    assert not fresh.exists()
    assert read_manifest(old).key == "of another compile"
    assert load_artifact(old).facts.vocab_size == 320
    assert len(list(old.parent.glob(".*.partial"))) == 2
    for folder in (fresh, old):
        compile_model(model, folder)
        assert load_artifact(folder).facts.vocab_size == 320
        assert read_manifest(folder).key != "of another compile"
    assert sorted(path.name for path in old.parent.iterdir()) == ["fresh", "old"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_leaves_the_old_artifact_and_nothing_half_made(old, start, number, code):
    body = f"stage == 'trace' and os.kill(os.getpid(), {int(number)})"
    assert ends(start(old, body)) == [code]
    assert [path.name for path in old.parent.iterdir()] == ["old"]
    assert read_manifest(old).key == "of another compile"
    assert load_artifact(old).facts.vocab_size == 320


def test_sigterm_is_left_to_whoever_handles_it_and_to_other_threads():
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with exits_on_sigterm():
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ThreadPoolExecutor(1) as other, exits_on_sigterm():
            handler = signal.getsignal(signal.SIGTERM)
            assert handler != signal.SIG_DFL
            assert other.submit(_handler_within).result() is handler
            with pytest.raises(SystemExit, match="143"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def _handler_within() -> object:
    with exits_on_sigterm():
        return signal.getsignal(signal.SIGTERM)


def test_a_full_disk_is_a_compile_error_and_leaves_nothing(start, tmp_path):
    limit = "stage == 'weights' and resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    process = start(tmp_path / "out", limit)
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "CompileError" in stderr
    assert "disk is full" in stderr
    assert list(tmp_path.iterdir()) == []


def test_two_compiles_of_one_model_at_once_give_one_good_artifact(start, tmp_path):
    assert ends(*(start(tmp_path / "out") for _ in range(2))) == [0, 0]
    assert load_artifact(tmp_path / "out").facts.vocab_size == 320
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_while_writing_small_files_is_named(model, tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ostinato.graph.source_hf.HfSource.write_tokenizer", full)
    with pytest.raises(CompileError, match="no space left"):
        compile_model(model, tmp_path / "out")
    assert list(tmp_path.glob("*")) == []
