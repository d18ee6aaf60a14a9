"""Case B13: what must make another artifact makes another key, and nothing else does."""

import shutil
from pathlib import Path

import pytest
import torch

from ostinato.graph.source import open_source
from ostinato.runtime import artifact, compile
from ostinato.runtime.compile import code_files, compile_key
from ostinato.runtime.config import EngineConfig
from tests.support.tiny_models import edit_json, make_tiny


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("key"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def key(folder: Path, **sections: object) -> str:
    return compile_key(open_source(folder), EngineConfig.model_validate(sections))


@pytest.mark.parametrize(
    "field",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 500_000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"sliding_window": 128},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"tie_word_embeddings": True},
        {"torch_dtype": "bfloat16"},
        {"num_hidden_layers": 1},
        {"something_new": 1},
    ],
    ids=lambda field: next(iter(field)),
)
def test_any_field_of_the_model_s_config_counts(folder: Path, field: dict[str, object]):
    before = key(folder)
    edit_json(folder / "config.json", **field)
    assert key(folder) != before


def test_settings_that_shape_an_artifact_count_and_those_of_a_run_do_not(original: Path):
    made = {
        key(original),
        key(original, graph={"dtype": "bfloat16"}),
        key(original, graph={"dtype": "float16"}),
        key(original, passes={"off": ["silu_mul"]}),
        key(original, passes={"off": ["rms_norm"]}),
        key(original, passes={"fuel": 3}),
    }
    assert len(made) == 6
    of_a_run = [
        {"kv": {"block_tokens": 32}},
        {"scheduler": {"max_running": 3, "max_step_tokens": 77}},
        {"server": {"port": 1}},
        {"max_model_len": 100},
        {"passes": {"dump_dir": "x"}},
    ]
    assert {key(original, **sections) for sections in [{}, *of_a_run]} == {key(original)}


def test_our_own_code_counts_whatever_its_language(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = key(original)
    for name in ("rms_norm.py", "rms_norm.cpp", "fuse_rms_norm.py", "device_sampler.py"):
        (path,) = [one for one in code_files() if one.name == name]
        edited = tmp_path / name
        edited.write_bytes(path.read_bytes() + b"\n")
        changed = [edited if one == path else one for one in code_files()]
        with monkeypatch.context() as patch:
            patch.setattr(compile, "code_files", lambda files=changed: files)
            assert key(original) != before
    assert key(original) == before


def test_another_torch_transformers_or_processor_counts(original: Path, monkeypatch: pytest.MonkeyPatch):
    import transformers

    before = {key(original)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        before.add(key(original))
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "9.0")
        before.add(key(original))
    with monkeypatch.context() as patch:
        patch.setattr(artifact.native, "cpu_features", lambda: ("avx4096",))
        before.add(key(original))
    assert len(before) == 4


def test_for_a_gpu_its_name_triton_and_the_library_that_may_attend_count(
    original: Path, monkeypatch: pytest.MonkeyPatch
):
    version, gpu = "3.1", "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    triton = "3.6.0"
    monkeypatch.setattr(compile.fa3_attention, "installed_version", lambda: version)
    monkeypatch.setattr(compile.metadata, "version", lambda package: {"triton": triton}[package])
    on_cpu = key(original)
    monkeypatch.setattr(compile, "chosen_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(compile, "this_target", lambda _: artifact.this_target(torch.device("cpu")))
    on_gpu = key(original)
    version = "3.2"
    assert key(original) != on_gpu
    version, gpu = "3.1", "NVIDIA H100 PCIe"
    assert key(original) != on_gpu
    gpu, triton = "NVIDIA H200", "3.7.0"
    assert key(original) != on_gpu
    triton = "3.6.0"
    assert key(original, max_model_len=100) == on_gpu
    monkeypatch.undo()
    assert key(original) == on_cpu


def test_the_same_model_under_another_path_has_the_same_key(original: Path, folder: Path):
    assert key(original) == key(folder) == key(original)
