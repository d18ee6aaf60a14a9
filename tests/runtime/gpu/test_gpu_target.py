"""Compiling for a GPU: two programs, operators that have no kernel, and what is compiled and kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.errors import CompileError
from ostinato.graph.config import GraphConfig
from ostinato.ops import attention_choice, kernel_store, skinny_linear, tuning
from ostinato.ops.attention_choice import Asked, Attention, Measured, StepClass, Way
from ostinato.ops.kernel_store import Binary, Variant
from ostinato.passes import pipeline
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu import gpu_target
from ostinato.runtime.gpu.gpu_target import GpuTarget
from ostinato.runtime.gpu.layer_calls import Layer
from ostinato.runtime.gpu.layer_tuning import Tuned
from ostinato.runtime.runner import StepShape
from tests.support.captured import capture_tiny
from tests.support.graphs import ops
from tests.support.tiny_models import tiny_config

CPU = torch.device("cpu")
CONFIG = EngineConfig()


def test_a_mixture_of_experts_is_refused_by_name_with_the_remedy() -> None:
    captured = capture_tiny(tiny_config("qwen3_moe"))[1]
    reports = pipeline.run(captured.graph_module, CONFIG.passes, captured.facts.expected_matches)
    with pytest.raises(CompileError, match=r"the model needs moe_experts, .*no GPU kernel.*--target cpu"):
        GpuTarget(Path(), CPU).plans(captured.graph_module, CONFIG, reports)


@pytest.mark.parametrize(("capability", "last"), [(80, 16), (90, 256), (100, 16)])
def test_few_tokens_have_a_program_of_their_own(
    capability: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_target, "capability", lambda _: capability)
    captured = capture_tiny(tiny_config("llama"))[1]
    reports = pipeline.run(captured.graph_module, CONFIG.passes, captured.facts.expected_matches)
    few, more = GpuTarget(Path(), CPU).plans(captured.graph_module, CONFIG, reports)
    assert (few.record.first, few.record.last, more.record.first) == (1, last, last + 1)
    assert ops(few.graph_module)["rope_attention"] == ops(more.graph_module)["paged_attention"] == 2
    assert "skinny_linear" not in ops(more.graph_module)


def variant(key: str) -> Variant:
    return Variant(key, "module", "kernel", (), (), (None, None, None, None))


def binary(key: str) -> tuple[Binary, bytes]:
    made = Binary(key=key, symbol="k", threads=128, shared=0, params=(), launch_pdl=False, offset=0, size=0)
    return made, key.encode()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuTarget:
    """A GPU whose programs launch kernel "old", which is compiled already, and "new"."""
    store = kernel_store.KernelStore()
    store.add(*binary("old"))
    monkeypatch.setattr(gpu_target, "STORE", store)
    monkeypatch.setattr(kernel_store, "capability_here", lambda: 90)
    monkeypatch.setattr(gpu_target, "capability", lambda _: 90)
    monkeypatch.setattr(tuning, "write", lambda folder: (folder / tuning.FILE).write_text('{"choices": []}'))
    monkeypatch.setattr(GpuTarget, "load", lambda self, plans: None)
    monkeypatch.setattr(GpuTarget, "_fill_weights", lambda self: None)
    backend = SimpleNamespace(shut=lambda: None)
    monkeypatch.setattr(gpu_target, "rehearsing_backend", lambda *_: backend)
    return GpuTarget(tmp_path, CPU)


def rehearsed(names: list[str]) -> Any:
    def rehearse(backend: object) -> None:
        recording = gpu_target.STORE.recording_now
        assert recording is not None
        for name in names:
            recording.variants[name] = variant(name)
            if not recording.is_dry:
                gpu_target.STORE.get(name, lambda: pytest.fail("compiled one by one"))  # type: ignore[arg-type, return-value]  # it raises

    return rehearse


UNTUNED = EngineConfig(graph=GraphConfig(tune_s=0))


def test_only_what_is_missing_is_compiled_and_all_that_is_launched_is_kept(
    target: GpuTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_target, "rehearse", rehearsed(["old", "new"]))
    asked: list[str] = []

    def compile_all(variants: list[Variant], capability: int) -> Any:
        assert capability == 90
        asked.extend(v.key for v in variants)
        return [binary(v.key) for v in variants]

    monkeypatch.setattr(gpu_target, "compile_all", compile_all)
    target.make_kernels([], UNTUNED, None)  # type: ignore[arg-type]  # facts are for the back end
    assert asked == ["new"]
    kept = kernel_store.KernelStore()
    assert kept.read(tmp_path) == 2
    assert kept.missing([variant("old"), variant("new")]) == []
    assert gpu_target.STORE.recording_now is None


def test_a_program_without_kernels_is_an_error(target: GpuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_target, "rehearse", rehearsed([]))
    with pytest.raises(CompileError, match="not one GPU kernel was launched"):
        target.make_kernels([], UNTUNED, None)  # type: ignore[arg-type]  # facts are for the back end


def test_layers_of_a_dry_step_are_measured_and_their_rows_are_what_is_served(
    target: GpuTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, shape = torch.zeros(8, 16), tuning.Shape("skinny_linear", 1, 8, 16, "float32")
    known = {shape._replace(tokens=4): tuning.BY_PARTS}
    ways: dict[str, Any] = {}
    served: list[tuning.Choices] = []

    def bind_gpu(folder: Path, plans: object, weights: object, ops: dict[str, Any]) -> None:
        ways.update(ops)

    def rehearsed_once(step: StepShape) -> None:
        recording = gpu_target.STORE.recording_now
        assert recording is not None
        assert recording.is_dry
        ways["ostinato::skinny_linear"](torch.zeros(2, 16), weight, None, None, 1e-5, 0.0, True, None)

    def tune_layers(layers: list[Layer], choices: tuning.Choices, gpu: object, seconds: float) -> Tuned:
        (layer,) = layers
        assert layer.calls[0].weight is weight
        assert (layer.shape(1), choices, seconds) == (shape, known, 5.0)
        return Tuned([tuning.row(shape, tuning.BY_PARTS, us=1.0, default_us=2.0)], 3, 2, 0.5, 1.5)

    def write(folder: Path) -> None:
        tuning.add(folder / tuning.FILE, [tuning.row(*one) for one in known.items()])

    monkeypatch.setattr(tuning, "write", write)
    backend = SimpleNamespace(shut=lambda: None, rehearse=rehearsed_once)
    monkeypatch.setattr(gpu_target, "rehearsing_backend", lambda *_: backend)
    monkeypatch.setattr(gpu_target, "bind_gpu", bind_gpu)
    monkeypatch.setattr(gpu_target, "tune_layers", tune_layers)
    monkeypatch.setattr(gpu_target, "Gpu", SimpleNamespace(of=lambda device: None))
    monkeypatch.setattr(skinny_linear, "_launch", lambda x, *_, **__: x)
    monkeypatch.setattr(gpu_target, "compile_all", lambda variants, capability: [binary("new")])
    monkeypatch.setattr(gpu_target, "rehearse", rehearsed(["new"]))
    monkeypatch.setattr(GpuTarget, "load", lambda self, plans: served.append(tuning.read(tmp_path)))
    with caplog.at_level("INFO"):
        target.make_kernels([], EngineConfig(graph=GraphConfig(tune_s=5)), None)  # type: ignore[arg-type]
    assert served == [known | {shape: tuning.BY_PARTS}]
    assert tuning.measured(tmp_path) == {"shapes": 1, "not_default": 1, "seconds": 1.5}
    assert (
        "1 shapes of linear layers measured, 1 go another way than the default; 3 candidates" in caplog.text
    )


def test_attention_that_a_dry_run_asked_for_is_measured_before_the_run_in_earnest(
    target: GpuTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Attention(4, 2, 16, 16, 4, "float32", 0, 0.0, False)
    step = StepClass(asked, "lone", 512)
    known: list[dict[StepClass, Way]] = []

    def measure(choices: Asked, *, window: int, device: torch.device) -> list[Measured]:
        assert gpu_target.STORE.recording_now is None
        assert (choices.attentions, window) == ({asked}, 900), "the key has no max_model_len"
        choices[step] = "triton"
        return [Measured(step, "triton", {"triton": 1.0})]

    def rehearse(backend: object) -> None:
        target._attention.attentions.add(asked)
        known.append(dict(target._attention))
        rehearsed(["new"])(backend)

    monkeypatch.setattr(gpu_target.attention_tuning, "measure", measure)
    monkeypatch.setattr(gpu_target, "rehearse", rehearse)
    monkeypatch.setattr(gpu_target, "compile_all", lambda variants, capability: [binary("new")])
    monkeypatch.setattr(GpuTarget, "_tune_layers", lambda *_: None)
    facts: Any = SimpleNamespace(max_model_len=900)
    target.make_kernels([], EngineConfig(max_model_len=700, graph=GraphConfig(tune_s=5)), facts)
    assert known == [{}, {step: "triton"}]
    assert attention_choice.read(tmp_path) == {step: "triton"}


def test_programs_are_bound_once_to_the_artifact_s_choices_and_to_those_that_are_still_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[dict[str, Any]] = []
    shape = tuning.Shape("skinny_linear", 1, 8, 16, "float32")
    tuning.add(tmp_path / tuning.FILE, [tuning.row(shape, tuning.BY_PARTS)])
    monkeypatch.setattr(GpuTarget, "_fill_weights", lambda self: None)
    monkeypatch.setattr(gpu_target, "bind_gpu", lambda *args: bound.append(args[-1]) or object())
    target = GpuTarget(tmp_path, CPU)
    assert target.load([]) is target.load([])
    (ops,) = bound
    assert ops["ostinato::skinny_linear"].keywords == {"choices": {shape: tuning.BY_PARTS}}
    for name in attention_choice.OPS:
        assert ops[f"ostinato::{name}"].keywords["choices"] is target._attention


def test_without_time_no_attention_is_measured(
    target: GpuTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target._attention.attentions.add(Attention(4, 2, 16, 16, 4, "float32", 0, 0.0, False))
    monkeypatch.setattr(gpu_target.attention_tuning, "measure", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(gpu_target, "rehearse", rehearsed(["old"]))
    target.make_kernels([], UNTUNED, None)  # type: ignore[arg-type]  # facts are for the back end
    assert not (tmp_path / attention_choice.FILE).exists()
