"""Triton stays out of a process that launches none of its kernels; what a launch hands to the driver."""

import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ostinato.errors import EngineError
from ostinato.ops import kernel_launch, kernel_store, launch, triton_kernels


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_every_op_does_not_import_triton_and_asking_for_a_kernel_does() -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    code = """
import sys
from ostinato.ops import add_rms_norm, all_ops
from ostinato.ops.launch import triton_function
there = "triton" in sys.modules
late = add_rms_norm._kernel
body = late.fn
kernel = triton_function(late)
import triton
seen = kernel.fn.__globals__
print(
    there, kernel.fn.__code__ is body.__code__, late.arg_names[0], add_rms_norm._kernel is late,
    type(seen["scaled"]) is type(kernel), seen["tl"] is triton.language, triton_function(kernel) is kernel,
)
"""
    assert run(code) == "False True x True True True True"


def test_a_kernel_without_triton_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)

    @launch.jit(do_not_specialize=["x"])
    def kernel(x: int) -> None: ...

    with pytest.raises(EngineError, match=r"needs triton on a GPU, and .* install triton"):
        kernel[1](0)


DRIVER = """
#include <cstring>
// as in cuda.h
struct Value { union { char pad[64]; int allowed; }; };
struct Attribute { int id; char pad[8 - sizeof(int)]; Value value; };
struct Config {
    unsigned grid[3], block[3], shared; void* stream; Attribute* attrs; unsigned num_attrs;
};
extern "C" long long seen[16];
long long seen[16];
extern "C" int cuLaunchKernelEx(const Config* c, void* function, void** params, void** extra) {
    for (int i = 0; i < 3; i++) { seen[i] = c->grid[i]; seen[3 + i] = c->block[i]; }
    seen[6] = c->shared; seen[7] = (long long)c->stream; seen[8] = c->num_attrs;
    seen[9] = 0;
    for (unsigned i = 0; i < c->num_attrs; i++)
        seen[9] = seen[9] * 10000 + c->attrs[i].id * 100 + c->attrs[i].value.allowed % 100;
    seen[10] = (long long)function; seen[11] = extra == nullptr;
    seen[12] = *(long long*)params[0]; seen[13] = *(int*)params[1];
    float f; memcpy(&f, params[2], 4); seen[14] = (long long)(f * 8);
    return c->grid[0] == 99 ? 700 : c->grid[0] == 98 ? 2 : 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """A driver that notes what it is asked to launch: (grid, block, shared, stream, attributes, ...)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the driver of this test is compiled by g++")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "driver.so"), str(tmp_path / "driver.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.PyDLL(str(tmp_path / "driver.so"))
    monkeypatch.setattr(kernel_launch, "_launch_kernel_ex", lambda: library.cuLaunchKernelEx)
    done = (SimpleNamespace(value=0), 4242)
    bindings = SimpleNamespace(
        cuModuleLoadData=lambda _: done,
        cuModuleGetFunction=lambda *_: done,
        cuFuncSetAttribute=lambda *_: done[:1],
        CUfunction_attribute=SimpleNamespace(
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=1,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=2,
        ),
        CUresult=lambda code: SimpleNamespace(name=f"CUDA_ERROR_{code}"),
    )
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    package = ModuleType("cuda.bindings")
    monkeypatch.setattr(package, "driver", bindings, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: GPU[0], raising=False)
    monkeypatch.setattr(kernel_store, "capability_here", lambda: 90)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    GPU[0] = 0
    return lambda: list((ctypes.c_longlong * 16).in_dll(library, "seen"))


GPU = [0]  # the current one
tl = launch.tl


def kernel(x, count, scale, rows, SIZE: tl.constexpr, PDL: tl.constexpr = False): ...  # type: ignore[no-untyped-def]  # Triton


class Store:
    """Variants by key; each takes (pointer, int, float, int)."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.launches, self.carveout = 0, 50
        self.recording_now: kernel_store.Recording | None = None

    def get(self, key: str, build: object) -> tuple[kernel_store.Binary, bytes]:
        self.keys.append(key.split("(", 1)[1])
        binary = kernel_store.Binary(
            key=key,
            symbol="kernel",
            threads=128,
            shared=1000,
            params=("ptr", "i64" if "count:i64" in key else "i32", "fp32", "i32", "ptr", "ptr"),
            launch_pdl="PDL=True" in key,
            offset=0,
            size=0,
        )
        return binary, b""


def test_a_launch_hands_the_driver_what_cuda_h_says(
    driver: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_store, "STORE", store := Store())
    ours = triton_kernels.TritonKernel(kernel, [__name__], ["count"], lambda: None)
    x = torch.zeros(64)
    for pdl in (True, False):
        options = {"SIZE": 4, "PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
        ours.launch((3, 2), (x, 7, 2.5, 32), options)
        attributes = [2, 1450_0601] if pdl else [1, 1450]  # carveout 50 %, dependent launch
        assert driver()[:15] == [3, 2, 1, 128, 1, 1, 1000, 77, *attributes, 4242, 1, x.data_ptr(), 7, 20]
    ours.launch((5,), (x[1:], -8, 0.5, 32), options)
    assert driver()[:3] == [5, 1, 1]
    assert driver()[12:15] == [x[1:].data_ptr(), -8, 4]
    store.carveout = 25  # the next step is of another shape
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 78)
    ours.launch((5,), (x[1:], -8, 0.5, 32), options)
    assert driver()[7:10] == [78, 1, 1425]
    with pytest.raises(EngineError, match=r"launch of kernel with grid \(99,\) failed: CUDA_ERROR_700"):
        ours.launch((99,), (x, 7, 2.5, 32), options)
    with pytest.raises(torch.OutOfMemoryError, match=r"launch of kernel with grid \(98,\) failed"):
        ours.launch((98,), (x, 7, 2.5, 32), options)
    assert store.launches == 4


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_kernel_that_finds_no_memory_is_told_like_torchs_own(
    driver: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    binary, cubin = built("kernel(x")
    binary = binary.model_copy(update={"shared": 200_000})
    for value, kind in ((2, torch.OutOfMemoryError), (719, EngineError)):
        answer = (SimpleNamespace(value=value, name="CUDA_ERROR_ANY"), None)
        monkeypatch.setattr(sys.modules["cuda.bindings"].driver, call, lambda *_, said=answer: said)
        with pytest.raises(kind, match="failed: CUDA_ERROR_ANY"):
            kernel_launch.Launcher(binary, cubin, 0)


@pytest.mark.parametrize(("shared", "asked"), [(1000, []), (48 << 10, []), (200_000, [200_000])])
def test_only_much_shared_memory_is_asked_for(
    driver: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, shared: int, asked: list[int]
) -> None:
    seen: list[tuple[object, ...]] = []

    def set_attribute(*said: object) -> tuple[object]:
        seen.append(said)
        return (SimpleNamespace(value=0),)

    monkeypatch.setattr(sys.modules["cuda.bindings"].driver, "cuFuncSetAttribute", set_attribute)
    binary, cubin = built("kernel(x")
    kernel_launch.Launcher(binary.model_copy(update={"shared": shared}), cubin, 0)
    assert seen == [(4242, 2, size) for size in asked], "MAX_DYNAMIC_SHARED_SIZE_BYTES"


def test_a_variant_is_found_by_what_the_arguments_are_and_not_by_how_they_are_given(
    driver: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_store, "STORE", store := Store())
    ours = triton_kernels.TritonKernel(kernel, [__name__], ["count"], lambda: None)
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.float16)

    def variants(*args: object, **kwargs: object) -> list[str]:
        before = len(store.keys)
        ours.launch((1,), args, kwargs)
        return [key.split(")")[0] for key in store.keys[before:]]

    first = "x:*fp32/16,count:i32,scale:fp32,rows:i32/16,SIZE=4,PDL=False"
    assert variants(x, 16, 1.0, 16, SIZE=4) == [first]
    assert variants(x, 17, 3.0, 48, SIZE=4) == []  # the value of `count` decides nothing
    assert variants(x, 16, 1.0, 16, 4, False) == []
    assert variants(x, 16, rows=16, SIZE=4, scale=1.0) == []
    assert variants(x, 16, rows=32, SIZE=4, scale=1.0) == []
    assert variants(x, 16, rows=33, SIZE=4, scale=1.0) == [first.replace("rows:i32/16", "rows:i32")]
    assert driver()[13:15] == [16, 8]  # given by name, in the order of the parameters
    assert variants(x, 16, 1.0, 33, SIZE=4) == []
    assert variants(x, 1 << 40, 1.0, 16, SIZE=4) == [first.replace("count:i32", "count:i64")]
    assert variants(x[1:], 16, 1.0, 16, SIZE=4) == [first.replace("fp32/16", "fp32")]
    assert variants(y, 16, 1.0, 16, SIZE=4) == [first.replace("*fp32", "*fp16")]
    assert variants(x, 16, 1.0, 16, SIZE=8) == [first.replace("SIZE=4", "SIZE=8")]
    assert variants(x, 16, 1.0, 16, SIZE=4, PDL=True) == [first.replace("PDL=False", "PDL=True")]
    assert variants(x, 16, 1.0, 16, SIZE=4, num_warps=8) == [first]
    with pytest.raises(EngineError, match="argument scale='a' is nothing a kernel can take"):
        ours.launch((1,), (x, 16, "a", 16), {"SIZE": 4})


def test_each_gpu_of_a_process_gets_a_module_of_its_own(
    driver: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_store, "STORE", store := Store())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    ours = triton_kernels.TritonKernel(kernel, [__name__], ["count"], lambda: None)
    x = torch.zeros(64)
    for device in (0, 1, 0, 1):
        GPU[0] = device
        ours.launch((1,), (x, 1, 1.0, 16), {"SIZE": 4})
        assert driver()[7] == 70 + device
    assert len(store.keys) == 2


def built(key: str) -> tuple[kernel_store.Binary, bytes]:
    """A variant that takes what `kernel` does."""
    return Store().get(key, None)  # type: ignore[return-value]  # a Binary and its cubin


def test_a_recording_notes_what_one_thread_launches_though_it_was_launched_before(
    driver: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second compile in a process, or one after an engine has started, must find all variants, too."""
    store = kernel_store.KernelStore()
    monkeypatch.setattr(kernel_store, "STORE", store)
    monkeypatch.setattr(triton_kernels, "compile_variant", lambda _, variant, capability: built(variant.key))
    ours = triton_kernels.TritonKernel(kernel, [__name__], ["count"], lambda: None)
    x = torch.zeros(64)

    def launch_on(size: int) -> None:
        ours.launch((1,), (x, 1, 1.0, 16), {"SIZE": size})

    launch_on(4)
    store.is_sealed = True  # an engine serves
    with pytest.raises(EngineError, match="is not in the artifact"):
        launch_on(8)
    seen_elsewhere: list[BaseException] = []

    def serve() -> None:
        try:
            launch_on(16)
        except EngineError as error:
            seen_elsewhere.append(error)

    with store.recording() as recording:
        launch_on(4)
        launch_on(8)
        other = threading.Thread(target=serve)
        other.start()
        other.join()
    assert len(seen_elsewhere) == 1  # the store is open to the compile only
    sizes = [dict(zip(v.names, v.kinds, strict=True))["SIZE"] for v in recording.variants.values()]
    assert sizes == [("const", 4), ("const", 8)]
    before = store.launches
    with store.recording(is_dry=True) as dry:
        launch_on(32)
        launch_on(4)
    assert store.launches == before
    (missing,) = store.missing(dry.variants.values())
    assert (missing.module, missing.function) == (__name__, "kernel")
    store.add(*built(missing.key))
    assert store.missing(dry.variants.values()) == []
    assert store.write(tmp_path, recording.variants) == 2
    again = kernel_store.KernelStore()
    assert again.read(tmp_path) == 2
    assert again.missing(recording.variants.values()) == []
