"""Artifacts: complete, verified, refused when damaged or made for something else."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ostinato.errors import ArtifactError, CompileError, ConfigError, ModelError
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.artifact import (
    LoadedModel,
    PlanRecord,
    check_fit,
    compile_options,
    load_artifact,
    read_manifest,
)
from ostinato.runtime.artifact_folder import same_artifact
from ostinato.runtime.compile import code_files, compile_model
from ostinato.runtime.compile_cache import resolve_artifact
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.file_hash import hash_file
from tests.support.tiny_models import edit_json, make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def artifact(model, shared_kernels, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    compile_model(model, out)
    return out


@pytest.fixture
def copy(artifact, tmp_path) -> Path:
    shutil.copytree(artifact, tmp_path / "copy")
    return tmp_path / "copy"


def edit_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_manifest_lists_and_hashes_every_other_file(artifact):
    manifest = read_manifest(artifact)
    there = {str(p.relative_to(artifact)) for p in artifact.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest.files) == there
    assert {"program.json", "kernels.so", "weights.safetensors", "tokenizer/tokenizer.json"} <= there


def test_proof_is_stored_and_within_its_budget(artifact):
    proof = read_manifest(artifact).proof
    assert 0 < proof.max_error <= proof.budget
    assert proof.kv_max_error <= proof.kv_budget
    assert proof.argmax_equal


def test_every_pass_matched_as_often_as_the_graph_says(artifact):
    records = {r.name: (r.matched, r.expected) for r in read_manifest(artifact).passes if r.expected}
    # 2 layers: 2 norms each and the last one; one gated MLP, one rotated write, QKV and gate/up groups
    assert records["rms_norm"] == (5, 5)
    assert records["silu_mul"] == (2, 2)
    assert records["rope_kv_write"] == (2, 2)
    assert records["merge_linears"] == (4, 4)


@pytest.mark.parametrize(
    "name",
    ["program.json", "kernels.so", "weights.safetensors", "tokenizer/tokenizer.json", "graph/after.py"],
)
def test_a_flipped_byte_is_found_and_the_file_named(copy, name):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"{name}: content does not match"):
        load_artifact(copy)


def test_a_missing_or_short_file_is_named(copy):
    (copy / "program.json").write_bytes((copy / "program.json").read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"program.json: \d+ bytes, the manifest says \d+"):
        load_artifact(copy)
    (copy / "program.json").unlink()
    with pytest.raises(ArtifactError, match=r"file program.json is missing"):
        load_artifact(copy)


def test_another_torch_is_refused_with_both_versions(copy):
    edit_manifest(copy, torch="2.10.0")
    with pytest.raises(
        ArtifactError, match=rf"torch: artifact 2\.10\.0, here {torch.__version__.split('+')[0]}"
    ):
        load_artifact(copy)


def test_a_processor_without_the_needed_features_is_refused(copy):
    target = json.loads((copy / "manifest.json").read_text())["target"]
    edit_manifest(copy, target={**target, "features": [*target["features"], "avx4096"]})
    with pytest.raises(ArtifactError, match="processor features: artifact avx4096, here absent"):
        load_artifact(copy)


def test_another_machine_type_is_refused(copy):
    target = json.loads((copy / "manifest.json").read_text())["target"]
    edit_manifest(copy, target={**target, "machine": "riscv128"})
    with pytest.raises(ArtifactError, match="target: artifact cpu/riscv128, here cpu/"):
        load_artifact(copy)


def logits(model: LoadedModel, tokens: int) -> torch.Tensor:
    """Of the last of `tokens` tokens of one sequence, in one step, with two KV blocks of 16 tokens."""
    ids = torch.arange(tokens)
    inputs = StepInputs(
        token_ids=ids + 4, positions=ids, slot_mapping=ids, block_tables=torch.tensor([[0, 1]]).int(),
        seq_lens=torch.tensor([tokens]).int(), query_start=torch.tensor([0, tokens]).int(),
        logit_rows=torch.tensor([tokens - 1]),
    )  # fmt: skip
    planes = [
        torch.zeros(2, 16, layer.kv_heads, size)
        for layer in model.facts.kv_layers
        for size in (layer.k_size, layer.v_size)
    ]
    return model(inputs, planes)


PROGRAM = "program.json"


@pytest.mark.parametrize(
    ("plans", "says"),
    [
        ([], "plans: there is none"),
        ([{"first": 2, "last": 9, "program": PROGRAM}], "plans: 2 to 9 tokens follow 0"),
        ([{"first": 1, "last": 0, "program": PROGRAM}], "plans: 1 to 0 tokens follow 0"),
        (
            [{"first": 1, "last": 4, "program": PROGRAM}, {"first": 6, "last": 9, "program": PROGRAM}],
            "plans: 6 to 9 tokens follow 4",
        ),
        ([{"first": 1, "last": 4, "program": "other.json"}], "plans: other.json is not among the files"),
        ({"1-8192": PROGRAM}, "plans: Input should be"),
    ],
)
def test_plans_that_leave_out_a_size_of_step_are_refused(copy, plans, says):
    edit_manifest(copy, plans=plans)
    with pytest.raises(ArtifactError, match=rf"manifest\.json: .*{says}"):
        load_artifact(copy)


def test_a_step_is_run_by_the_plan_for_its_number_of_tokens(copy):
    few = PlanRecord(first=1, last=4, program=PROGRAM)
    many = PlanRecord(first=5, last=8192, program="many.json")
    program = json.loads((copy / PROGRAM).read_text())
    ones = {"op": "aten.ones_like.default", "args": [{"ref": program["result"]}], "out": "ones"}
    program |= {"steps": [*program["steps"], ones], "result": "ones"}
    (copy / "many.json").write_text(json.dumps(program))
    files = json.loads((copy / "manifest.json").read_text())["files"]
    files["many.json"] = {
        "bytes": (copy / "many.json").stat().st_size, "digest": hash_file(copy / "many.json")
    }  # fmt: skip
    edit_manifest(copy, plans=[few.model_dump(), many.model_dump()], files=files)
    model = load_artifact(copy)
    is_many = {tokens: bool((logits(model, tokens) == 1).all()) for tokens in (1, 4, 5, 20)}
    assert is_many == {1: False, 4: False, 5: True, 20: True}


def test_another_schema_version_is_refused(copy):
    edit_manifest(copy, version=999)
    with pytest.raises(ArtifactError, match="schema version 999, this ostinato"):
        load_artifact(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 2}'])
def test_a_broken_manifest_is_an_artifact_error(copy, text):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_artifact(copy)


def test_a_folder_that_is_no_artifact_is_refused(tmp_path):
    with pytest.raises(
        ArtifactError, match=r"absent: no such file or folder; give an artifact, a model folder"
    ):
        load_artifact(tmp_path / "absent")
    with pytest.raises(ArtifactError, match="not an artifact"):
        load_artifact(tmp_path)


def test_compiling_over_something_else_is_refused_and_leaves_it(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="exists and is not an artifact"):
        compile_model(model, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_unchanged_model_is_not_compiled_again(model, artifact):
    before = (artifact / "manifest.json").stat().st_mtime_ns
    compile_model(model, artifact)
    assert (artifact / "manifest.json").stat().st_mtime_ns == before


def test_another_setting_gives_another_artifact_in_the_cache(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = resolve_artifact(model, EngineConfig())
    off = resolve_artifact(model, EngineConfig.model_validate({"passes": {"off": ["silu_mul"]}}))
    assert plain != off
    assert resolve_artifact(model, EngineConfig()) == plain
    records = {r.name: r.matched for r in read_manifest(off).passes}
    assert records.get("silu_mul", 0) == 0
    assert resolve_artifact(off, EngineConfig()) == off
    packed = plain / "weights.safetensors"
    packed.write_bytes(bytes(packed.stat().st_size))  # as long as it was
    load_artifact(resolve_artifact(model, EngineConfig()))


def test_a_damaged_artifact_is_not_taken_for_done_and_a_warning_names_the_file(copy, caplog):
    key = read_manifest(copy).key
    whole = {name: (copy / name).read_bytes() for name in ("manifest.json", PROGRAM, "weights.safetensors")}
    for name, raw in whole.items():
        for damaged in (b"", raw[:-1], bytes(len(raw)), None):
            (copy / name).unlink()
            if damaged is not None:
                (copy / name).write_bytes(damaged)
            caplog.clear()
            assert same_artifact(copy, key) is None
            if (name, damaged) != ("manifest.json", None):  # then there is none
                assert name in caplog.text
                assert "; replacing it" in caplog.text
            (copy / name).write_bytes(raw)
    caplog.clear()
    assert (same_artifact(copy, key) == read_manifest(copy), caplog.text) == (True, "")
    assert (same_artifact(copy, "another"), caplog.text) == (None, "")


def test_kernels_in_any_language_are_of_the_key():
    suffixes = {path.suffix for path in code_files() if path.parent.name == "ops"}
    assert suffixes >= {".py", ".cpp", ".h", ".cu"}


def test_a_dump_is_written_also_when_the_artifact_is_up_to_date(model, artifact, tmp_path):
    config = EngineConfig.model_validate({"passes": {"dump_dir": str(tmp_path / "dump")}})
    key = read_manifest(artifact).key
    assert compile_model(model, artifact, config).key == key
    assert (tmp_path / "dump" / "04_silu_mul.after.py").is_file()


def test_settings_that_come_after_the_compile_are_named_in_a_warning(artifact, caplog):
    load_artifact(
        artifact, EngineConfig.model_validate({"graph": {"dtype": "float32"}, "kv": {"max_gib": 1}})
    )
    assert caplog.text == ""
    late = {"graph": {"dtype": "bfloat16"}, "passes": {"off": ["silu_mul"], "dump_dir": "x"}}
    load_artifact(artifact, EngineConfig.model_validate(late))
    assert "without graph.dtype=bfloat16, passes.off=['silu_mul'], which has no effect now" in caplog.text
    assert resolve_artifact(artifact, EngineConfig.model_validate(late)) == artifact
    assert "passes.dump_dir=x" in caplog.text


@pytest.mark.parametrize("where", ["file/out", "file/deep/out"])
def test_a_place_that_cannot_be_written_is_named(model, tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CompileError, match=r"file.*: .*; choose another folder for -o"):
        compile_model(model, tmp_path / where)


def test_a_place_where_the_system_takes_no_files_is_named(model):
    with pytest.raises(CompileError, match=r"/sys.*: .*; choose another folder for -o"):
        compile_model(model, "/sys/ostinato-test")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chat_template.jinja", "{% if %}", "chat template, line 1"),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config.json: temperature"),
        ("generation_config.json", '{"temperature": NaN}', "generation_config.json: temperature"),
        ("generation_config.json", '{"top_p": 0}', "generation_config.json: top_p"),
    ],
)
def test_text_files_that_would_not_load_are_found_by_the_compiler(model, tmp_path, name, content, says):
    shutil.copytree(model, tmp_path / "bad")
    (tmp_path / "bad" / name).write_text(content)
    with pytest.raises(ModelError, match=rf"bad: {says}.*; correct the model's file"):
        compile_model(tmp_path / "bad", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_unknown_pass_in_off_is_a_config_error_that_lists_the_known(model, tmp_path):
    config = EngineConfig.model_validate({"passes": {"off": ["silu_mull"]}})
    with pytest.raises(ConfigError, match=r"silu_mull.*silu_mul"):
        compile_model(model, tmp_path / "out", config)
    assert list(tmp_path.glob("*")) == []


def test_an_unknown_source_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no such file or folder"):
        compile_model(tmp_path / "absent", tmp_path / "out")


def test_a_config_of_another_size_is_refused_before_anything_is_computed(model, tmp_path, monkeypatch):
    wide = Path(shutil.copytree(model, tmp_path / "wide"))
    edit_json(wide / "config.json", hidden_size=64 * 10**5)
    monkeypatch.setattr("ostinato.runtime.compile.capture", lambda *_, **__: pytest.fail("traced"))
    with pytest.raises(ModelError, match="config and weights are of different models"):
        compile_model(wide, tmp_path / "out")


HOPPER = ["sm_90", "132 multiprocessors"]


def hopper(places):
    found = SimpleNamespace(major=9, minor=0, multi_processor_count=places)
    return lambda _: found


def test_a_gpu_of_another_size_is_refused_for_its_kernels_may_be_others(copy, monkeypatch):
    here = read_manifest(copy)
    edit_manifest(copy, target={**here.target.model_dump(), "device": "cuda", "features": HOPPER})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", hopper(114))  # a PCIe card
    wanted = "GPU: artifact sm_90, 132 multiprocessors, here sm_90, 114 multiprocessors"
    with pytest.raises(ArtifactError, match=wanted):
        check_fit(read_manifest(copy))
    monkeypatch.setattr(torch.cuda, "get_device_properties", hopper(132))
    check_fit(read_manifest(copy))


def test_kernels_of_a_gpu_fit_one_size_of_block_and_another_is_refused(copy, monkeypatch):
    here = read_manifest(copy)
    target = {**here.target.model_dump(), "device": "cuda", "features": HOPPER}
    edit_manifest(copy, target=target, options={**here.options, "kv.block_tokens": 32})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", hopper(132))
    with pytest.raises(ArtifactError, match=r"kernels are for kv\.block_tokens=32, not 16; serve it with 32"):
        load_artifact(copy, EngineConfig())
    assert compile_options(EngineConfig(), "cuda")["kv.block_tokens"] == 16
    assert "kv.block_tokens" not in compile_options(EngineConfig())
