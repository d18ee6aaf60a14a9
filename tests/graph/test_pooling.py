"""What sentence-transformers folders say of pooling is done, and refused where it cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato.errors import ConfigError, ModelError
from ostinato.graph.config import GraphConfig
from ostinato.graph.pooling import pooling_plan
from ostinato.graph.source import open_source
from tests.support.pool_captured import Captured
from tests.support.tiny_encoders import hidden_states, make_encoder

KINDS = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
MEAN = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without modules.json."""
    folder = tmp_path_factory.mktemp("plain")
    make_encoder("bert", folder, num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Its files, to be added to."""
    for file in plain.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(folder: Path, *kinds: str, pooling: dict[str, Any] = MEAN) -> None:
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    modules = [
        {"idx": at, "name": str(at), "path": KINDS.get(kind, kind), "type": types[at]}
        for at, kind in enumerate(kinds)
    ]
    write(folder / "modules.json", modules[::-1])  # the order is that of idx
    write(folder / "1_Pooling" / "config.json", pooling)


def test_a_folder_without_modules_gives_unit_vectors_and_asks_for_the_pooling(plain: Path):
    assert pooling_plan(open_source(plain), GraphConfig()) == ("embed", None, True, (), None, ())
    plan = pooling_plan(open_source(plain), GraphConfig(pooling="cls"))
    assert plan is not None
    assert plan.pooling == "cls"
    assert pooling_plan(open_source(plain), GraphConfig(task="generate")) is None
    with pytest.raises(ConfigError, match=r"graph\.pooling=mean: .* is a model to score with"):
        pooling_plan(open_source(plain), GraphConfig(task="score", pooling="mean"))


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}, "last"),
        ({"embedding_dimension": 48, "pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_and_length_are_read_from_the_folder(
    folder: Path, stated: dict[str, Any], pooling: str, caplog: pytest.LogCaptureFixture
):
    write_modules(folder, "Transformer", "Pooling", pooling=stated)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 20})
    write(folder / "config_sentence_transformers.json", {"default_prompt_name": "query"})
    before = open_source(folder).fingerprint
    assert pooling_plan(open_source(folder), GraphConfig()) == ("embed", pooling, False, (), 20, ())
    write(folder / "sentence_bert_config.json", {"max_seq_length": 21})
    assert open_source(folder).fingerprint != before
    assert "the prompt 'query' is not put in front of inputs" in caplog.text


def test_dense_layers_and_normalisation_are_carried(folder: Path):
    write_modules(folder, "Transformer", "Pooling", "Dense", "Normalize")
    dense = {"in_features": 48, "out_features": 20, "activation_function": "torch.nn.modules.activation.Tanh"}
    write(folder / "2_Dense" / "config.json", dense)
    weight, bias = torch.randn(20, 48), torch.randn(20)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    captured = Captured(folder, GraphConfig())
    assert (captured.pooling.size, captured.pooling.normalize) == (20, True)
    model = make_encoder("bert", folder.parent / "again", num_hidden_layers=1)
    found = captured.run([[5, 6, 7], [8]], [])
    for row, ids in zip(found, ([5, 6, 7], [8]), strict=True):
        truth = torch.tanh(weight @ hidden_states(model, ids).mean(0) + bias)
        assert (row - truth).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kinds", "pooling", "said"),
    [
        (("Transformer", "Pooling", "LSTM"), MEAN, "module 2 is 'LSTM'; readable are Transformer, Pooling"),
        (("Transformer", "Normalize", "Pooling", "Dense"), MEAN, "module 3 is 'Dense'"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens cannot be"),
        (
            ("Transformer", "Pooling"),
            MEAN | {"pooling_mode_cls_token": True},
            "mean_tokens, pooling_mode_cls",
        ),
        (("Transformer", "../out"), MEAN, "leads out of the model folder"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    folder: Path, kinds: tuple[str, ...], pooling: dict[str, Any], said: str
):
    write_modules(folder, *kinds, pooling=pooling)
    with pytest.raises(ModelError, match=said):
        pooling_plan(open_source(folder), GraphConfig())


def test_broken_files_are_named(folder: Path):
    write(folder / "modules.json", {"idx": 0})
    with pytest.raises(ModelError, match=r"modules.json: dict instead of a list"):
        pooling_plan(open_source(folder), GraphConfig())
    write(folder / "modules.json", [{"idx": 0}])
    with pytest.raises(ModelError, match=r"modules.json: broken \(KeyError\('type'\)\)"):
        pooling_plan(open_source(folder), GraphConfig())
    write_modules(folder, "Transformer", "Pooling", "Dense")
    write(folder / "2_Dense" / "config.json", {"in_features": 48, "out_features": 20})
    save_file({"linear.weight": torch.zeros(20, 47)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelError, match=r"no linear.weight of shape \[20, 48\]"):
        pooling_plan(open_source(folder), GraphConfig())
