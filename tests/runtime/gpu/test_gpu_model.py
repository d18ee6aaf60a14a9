"""A model in GPU memory: what its ops are given, and what it refuses before it reads weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.errors import ArtifactError
from ostinato.ops import attention_choice, fa3_attention, tuning
from ostinato.ops.attention_choice import Attention, Measured, StepClass, Way
from ostinato.runtime.gpu import gpu_model
from ostinato.runtime.gpu.gpu_model import launchers, load_gpu

LONE = StepClass(Attention(32, 8, 128, 128, 16, "bfloat16", 0, 0.0, False), "lone", 512)


def test_each_op_with_choices_is_given_those_of_the_artifact() -> None:
    layers: tuning.Choices = {}
    attention: dict[StepClass, Way] = {LONE: "triton"}
    made: dict[str, Any] = launchers(layers, attention)
    given = {name.partition("::")[2]: op.keywords for name, op in made.items() if hasattr(op, "keywords")}
    assert given.keys() == {*tuning.OPS, *attention_choice.OPS}
    for name, keywords in given.items():
        assert keywords["choices"] is (layers if name in tuning.OPS else attention)


def test_a_library_that_is_missing_is_named_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa3_attention, "installed_version", lambda: "3.1")
    attention_choice.write(tmp_path, [Measured(LONE, "fa3", {"fa3": 1.0})])
    (tmp_path / tuning.FILE).write_text('{"choices": []}')
    monkeypatch.setattr(fa3_attention, "installed_version", lambda: "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(gpu_model, "DeviceWeights", lambda *_: pytest.fail("weights are read"))
    files = {attention_choice.FILE: None}
    manifest: Any = SimpleNamespace(facts=SimpleNamespace(pooling=None), files=files)
    with pytest.raises(ArtifactError, match=r"pip install tokenspeed-fa3==3\.1, or compile the model again"):
        load_gpu(tmp_path, manifest, torch.device("cuda"))


def test_a_table_of_attention_that_the_manifest_does_not_have_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def take(choices: object, attention: object) -> None:
        given.append(attention)
        raise ArtifactError("enough")

    attention_choice.write(tmp_path, [Measured(LONE, "triton", {"triton": 1.0})])
    (tmp_path / tuning.FILE).write_text('{"choices": []}')
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(gpu_model, "launchers", take)
    for files in ({attention_choice.FILE: None}, {}):
        manifest: Any = SimpleNamespace(facts=SimpleNamespace(pooling=None), files=files)
        with pytest.raises(ArtifactError, match="enough"):
            load_gpu(tmp_path, manifest, torch.device("cuda"))
    assert given == [{LONE: "triton"}, {}]
