"""Compiling for a GPU: two programs, operators that have no kernel, and what is compiled and kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.errors import CompileError
from ostinato.ops import kernel_store, tuning
from ostinato.ops.kernel_store import Binary, Variant
from ostinato.passes import pipeline
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.gpu import gpu_target
from ostinato.runtime.gpu.gpu_target import GpuTarget
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
    monkeypatch.setattr(tuning, "write", lambda folder: None)
    monkeypatch.setattr(GpuTarget, "load", lambda self, plans: None)
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
    target.make_kernels([], CONFIG, None)  # type: ignore[arg-type]  # facts are for the back end
    assert asked == ["new"]
    kept = kernel_store.KernelStore()
    assert kept.read(tmp_path) == 2
    assert kept.missing([variant("old"), variant("new")]) == []
    assert gpu_target.STORE.recording_now is None


def test_a_program_without_kernels_is_an_error(target: GpuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_target, "rehearse", rehearsed([]))
    with pytest.raises(CompileError, match="not one GPU kernel was launched"):
        target.make_kernels([], CONFIG, None)  # type: ignore[arg-type]  # facts are for the back end
