"""Opening model folders: config, number type, special ids, fingerprint, and errors that name the file."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.errors import ModelError
from ostinato.graph.build import build_model
from ostinato.graph.hooks import CaptureHooks
from ostinato.graph.source import load_config, open_source, resolve_dtype
from tests.support.tiny_models import EOS_ID, edit_json, make_tiny


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_a_path_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match="nowhere: no such file or folder"):
        open_source(tmp_path / "nowhere")


def test_a_file_that_is_no_model_is_named(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt: not a model; give a folder"):
        open_source(tmp_path / "notes.txt")


def test_a_pointer_of_git_lfs_is_named(folder: Path, tmp_path: Path):
    for file in (tmp_path / "model.gguf", folder / "model.safetensors"):
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    for model, file in ((tmp_path / "model.gguf",) * 2, (folder, folder / "model.safetensors")):
        with pytest.raises(ModelError, match=rf"^{file}: a pointer of Git LFS.*; run `git lfs pull`"):
            open_source(model)


def test_a_folder_without_config_is_named(folder: Path):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: missing; a model folder needs it"):
        open_source(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1]", "list instead of an object"),
        ('{"hidden_size": 4}', "no model_type"),
    ],
)
def test_a_broken_config_is_named(folder: Path, text: str, message: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        open_source(folder)


def test_the_tensors_and_their_specs_are_those_of_the_file(folder: Path):
    source = open_source(folder)
    stored = load_file(folder / "model.safetensors")
    assert source.kind == "hf"
    assert sorted(source.tensor_names()) == sorted(stored)
    for name, tensor in stored.items():
        assert source.tensor_spec(name) == (tuple(tensor.shape), torch.bfloat16)
        assert torch.equal(source.read(name), tensor)


def test_an_unknown_architecture_is_named(folder: Path):
    edit_json(folder / "config.json", model_type="quantum_llama")
    with pytest.raises(ModelError, match="unknown architecture 'quantum_llama'"):
        load_config(open_source(folder))


def test_a_config_that_transformers_refuses_is_named(folder: Path):
    edit_json(folder / "config.json", hidden_size="wide")
    with pytest.raises(ModelError, match=r"transformers refuses the config.*hidden_size"):
        load_config(open_source(folder))


def test_a_quantised_checkpoint_is_refused_by_its_method(folder: Path):
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="quant_method=gptq"):
        load_config(open_source(folder))


def test_a_config_without_rope_fields_gets_transformers_default_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=None, rope_scaling=None)
    with caplog.at_level(logging.WARNING):
        config = load_config(open_source(folder))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert "no rotary field in the config; transformers' default for llama is used" in caplog.text


def test_a_config_with_rope_fields_is_quiet(folder: Path, caplog: pytest.LogCaptureFixture):
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=5e5)
    with caplog.at_level(logging.WARNING):
        assert load_config(open_source(folder)).rope_parameters["rope_theta"] == 5e5
    assert caplog.text == ""


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stated", ["float32", "bfloat16", None])
@pytest.mark.parametrize("choice", ["auto", "float32", "bfloat16", "float16"])
def test_the_number_type_is_the_documented_one(
    original: Path, tmp_path: Path, choice: str, stated: str | None, file_dtype: torch.dtype, key: str
):
    shutil.copy(original / "config.json", tmp_path / "config.json")
    edit_json(tmp_path / "config.json", dtype=None)
    edit_json(tmp_path / "config.json", **{key: stated})
    save_file(
        {"w": torch.ones(100, dtype=file_dtype), "i": torch.ones(9, dtype=torch.int64)},
        tmp_path / "model.safetensors",
    )
    expected = choice if choice != "auto" else stated or str(file_dtype).removeprefix("torch.")
    assert str(resolve_dtype(choice, open_source(tmp_path))) == f"torch.{expected}"


def test_the_number_type_is_logged_once_with_its_reason(folder: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        resolve_dtype("auto", open_source(folder))
    assert [record.getMessage() for record in caplog.records] == [
        "number type bfloat16 (dtype in the config)"
    ]


def test_float16_is_refused_for_gemma(folder: Path):
    edit_json(folder / "config.json", model_type="gemma3_text")
    with pytest.raises(ModelError, match=r"gemma3_text overflows float16.*set graph.dtype to bfloat16"):
        resolve_dtype("float16", open_source(folder))


def test_an_unsupported_number_type_is_refused(folder: Path):
    edit_json(folder / "config.json", dtype="float64")
    with pytest.raises(ModelError, match=r"number type float64 \(dtype in the config\) is not supported"):
        resolve_dtype("auto", open_source(folder))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, True, (7, 8, 9, EOS_ID)),
        ({"eos_token_id": EOS_ID}, {"eos_token_id": [EOS_ID, 5]}, True, (EOS_ID, 5)),
        ({}, {}, True, (EOS_ID,)),
        (None, {}, False, ()),
    ],
)
def test_eos_ids_are_gathered_from_all_three_places(
    folder: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    tokenizer: bool,
    expected: tuple[int, ...],
):
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    edit_json(folder / "config.json", **{"eos_token_id": None, "bos_token_id": None, **config})
    if not tokenizer:
        (folder / "tokenizer.json").unlink()
    source = open_source(folder)
    assert source.eos_token_ids == expected
    assert source.bos_token_id == (1 if tokenizer else None)


def test_the_fingerprint_changes_with_config_weights_and_tokenizer_and_not_with_the_path(
    original: Path, folder: Path
):
    first = open_source(original).fingerprint
    assert open_source(folder).fingerprint == first
    weights = load_file(folder / "model.safetensors")
    seen = {first}
    weights["model.norm.weight"][-1] += 1
    save_file(weights, folder / "model.safetensors")
    seen.add(open_source(folder).fingerprint)
    edit_json(folder / "config.json", rms_norm_eps=1e-3)
    seen.add(open_source(folder).fingerprint)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(open_source(folder).fingerprint)
    assert len(seen) == 4


@pytest.mark.parametrize("layers", [-1, 0, 1_000_000])
def test_a_number_of_layers_that_cannot_be_is_refused_at_once(folder: Path, layers: int):
    edit_json(folder / "config.json", num_hidden_layers=layers)
    with pytest.raises(ModelError, match=rf"num_hidden_layers={layers} .* the files hold 21 tensors"):
        load_config(open_source(folder))


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"num_key_value_heads": 0}])
def test_a_config_that_divides_by_zero_is_a_model_error(folder: Path, change: dict[str, int]):
    edit_json(folder / "config.json", head_dim=None, **change)
    with pytest.raises(ModelError, match="config"):
        build_model(load_config(open_source(folder)), torch.float32, CaptureHooks())


@pytest.mark.parametrize("change", [{"hidden_size": -64}, {"vocab_size": -1}, {"pad_token_id": 5000}])
def test_sizes_that_transformers_cannot_build_are_a_model_error(folder: Path, change: dict[str, int]):
    edit_json(folder / "config.json", **change)
    with pytest.raises(ModelError, match=r"config\.json: transformers cannot build LlamaForCausalLM from it"):
        build_model(load_config(open_source(folder)), torch.float32, CaptureHooks())


@pytest.mark.parametrize("window", [-5, 0, 1])
def test_a_context_window_without_room_for_an_answer_is_refused(folder: Path, window: int):
    edit_json(folder / "config.json", max_position_embeddings=window)
    with pytest.raises(ModelError, match=rf"max_position_embeddings={window} in the config leaves no room"):
        load_config(open_source(folder))
