"""CUDA sources: what decides a variant, what a dry run and a sealed store do, what the compiler says."""

import re
from pathlib import Path

import pytest
import torch

from ostinato.errors import EngineError
from ostinato.ops import cuda_kernels
from ostinato.ops.cuda_kernels import CudaKernel, Matrix, can_map
from ostinato.ops.kernel_store import KernelStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> KernelStore:
    """An empty one, on a machine that says it has a Hopper GPU."""
    made = KernelStore()
    monkeypatch.setattr(cuda_kernels, "STORE", made)
    monkeypatch.setattr(cuda_kernels, "capability", lambda _: 90)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return made


def kernel(folder: Path, *, source: str = "int a;", header: str = "int b;") -> CudaKernel:
    path = folder / "made.cu"
    path.write_text(source)
    cuda_kernels._digest.cache_clear()
    return CudaKernel(path, "made", ("ptr",), lambda _: {"made.cuh": header}, module=__name__, name="KERNEL")


def noted(store: KernelStore, made: CudaKernel, **constants: int) -> str:
    """The key of the one variant that a dry run notes."""
    with store.recording(is_dry=True) as wanted:
        made.launch(1, (0,), constants, threads=32, shared=0)
    (key,) = wanted.variants
    return key


def test_source_headers_and_constants_decide_a_variant(store: KernelStore, tmp_path: Path) -> None:
    key = noted(store, kernel(tmp_path), N=1)
    assert key.endswith(".sm_90a(N=1)")
    assert key == noted(store, kernel(tmp_path), N=1)
    others = [
        noted(store, kernel(tmp_path), N=2),
        noted(store, kernel(tmp_path, source="int c;"), N=1),
        noted(store, kernel(tmp_path, header="int c;"), N=1),
    ]
    assert len({key, *others}) == 4


def test_a_dry_run_compiles_nothing_and_a_sealed_store_names_what_it_lacks(
    store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernel(tmp_path)
    monkeypatch.setattr(made, "compile", lambda *_: pytest.fail("compiled"))
    key = noted(store, made, N=1)
    store.is_sealed = True
    with pytest.raises(
        EngineError, match=rf"{re.escape(key)} is not in the artifact; compile the model again"
    ):
        made.launch(1, (0,), {"N": 1}, threads=32, shared=0)


def test_what_the_copy_engine_cannot_read_is_known() -> None:
    right = Matrix(1 << 20, 4, 64, 64, torch.bfloat16)
    assert can_map(right)
    for change in (
        {"address": (1 << 20) + 8},
        {"stride": 68},
        {"rows": 0},
        {"columns": 0},
        {"dtype": torch.float32},
    ):
        assert not can_map(right._replace(**change)), change


def test_a_source_that_does_not_compile_is_an_error_with_the_line() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings exists for Linux and Windows only")
    with pytest.raises(EngineError, match=re.compile(r"NVRTC: .*kernel\.cu\(1\): error: .*undefined", re.S)):
        cuda_kernels.compiled("int a = nowhere;", {}, [], 90)
