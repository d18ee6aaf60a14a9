"""CUDA sources: what decides a variant, what a dry run and a sealed store do, what the compiler says."""

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.errors import EngineError
from ostinato.ops import cuda_kernels
from ostinato.ops.cuda_kernels import Boxes, CudaKernel, Matrix, box_map, can_map, matrix_map
from ostinato.ops.kernel_store import Binary, KernelStore


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


def test_a_variant_is_loaded_once_for_each_gpu(
    store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, device, loaded = kernel(tmp_path), [0], list[int]()
    launched: list[tuple[int, object]] = []

    def launcher(binary: Binary, cubin: bytes, at: int) -> object:
        loaded.append(at)
        return lambda grid, args: launched.append((at, args))

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device[0])
    monkeypatch.setattr(cuda_kernels, "Launcher", launcher)
    for device[0] in (0, 1, 0, 1):
        binary = made._variant({"N": 1}, 32, 0)
        store.add(Binary(key=binary.key, symbol="made", threads=32, shared=0, params=(), launch_pdl=True,
                         offset=0, size=0), b"")  # fmt: skip
        made.launch((1,), (device[0],), {"N": 1}, threads=32, shared=0)
    assert loaded == [0, 1]
    assert launched == [(0, (0,)), (1, (1,)), (0, (0,)), (1, (1,))]


def test_a_map_says_in_bytes_where_rows_lie_and_a_refusal_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def encode(at: Any, kind: int, rank: int, address: Any, *lists: Any) -> int:
        shape, strides, box, steps, *rest = lists
        seen[:] = [at.value % 64, kind, rank, address.value, *map(list, (shape, strides, box, steps)), rest]
        ctypes.memset(at, 7, 128)
        return 1 if rank == 4 else 0

    library = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(ctypes, "PyDLL", lambda _: library)
    box_map.cache_clear()
    matrix_map.cache_clear()
    assert matrix_map(Matrix(4096, 10, 100, 104, torch.float16), 8) == bytes([7] * 128)
    plain, swizzle_128, l2_256 = 0, 3, 3
    assert seen == [0, 6, 2, 4096, [100, 10], [208], [64, 8], [1, 1], [plain, swizzle_128, l2_256, plain]]
    planes = Boxes(8192, (128, 2, 16, 30), (128, 256, 4096), (64, 1, 16, 1), torch.bfloat16)
    with pytest.raises(EngineError, match=r"cuTensorMapEncodeTiled failed with 1 for Boxes\(address=8192"):
        box_map(planes)
    assert seen[1:6] == [9, 4, 8192, [128, 2, 16, 30], [256, 512, 8192]]
    box_map.cache_clear()
    matrix_map.cache_clear()


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
