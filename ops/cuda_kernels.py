"""Kernels written in CUDA C++: a source beside its op, compiled by NVRTC, kept and launched as Triton's are.

A variant is a source with constants. It is compiled where a compile runs; the artifact holds its cubin, and a
server needs the source for its hash, and no NVRTC.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ostinato.errors import EngineError
from ostinato.ops.kernel_launch import Launcher
from ostinato.ops.kernel_store import STORE, Binary, Variant, capability

MAX_SHARED = 227 << 10  # bytes that a block of sm_90 may use
_ROW = 128  # bytes of a row of a tile in shared memory, the width of the swizzle
_MAP_BYTES = 128  # of a CUtensorMap
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class CudaKernel:
    """A `.cu` file with one kernel.

    `params`: "map", "ptr", "i32" or "fp32", in the order of the kernel's; `headers`: from constants to the
    texts of the files that the source includes, by name.
    """

    def __init__(
        self,
        source: Path,
        function: str,
        params: Sequence[str],
        headers: Callable[[Mapping[str, int]], Mapping[str, str]],
        *,
        module: str,
        name: str,
    ) -> None:
        """`name` is that of this object in `module`, by which a process that compiles finds it."""
        self._source, self._symbol, self._params, self._headers = source, function, tuple(params), headers
        self._module, self._name = module, name
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def launch(
        self,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, int],
        *,
        threads: int,
        shared: int,
    ) -> None:
        """Launch on the current stream as a dependent kernel. `constants` decide the variant alone."""
        device = torch._C._cuda_getDevice()
        key = (device, *constants.values())
        launcher = self._launchers.get(key)
        recording = STORE.recording_now
        if launcher is None or (recording is not None and recording.is_mine()):
            variant = self._variant(constants, threads, shared)
            if recording is not None and recording.is_mine():
                recording.variants[variant.key] = variant
                if recording.is_dry:
                    return
            binary, cubin = STORE.get(variant.key, lambda: self.compile(variant, capability(device)))
            launcher = self._launchers[key] = Launcher(binary, cubin, device)
        launcher(grid, args)

    def _variant(self, constants: Mapping[str, int], threads: int, shared: int) -> Variant:
        said = ",".join(f"{name}={value}" for name, value in constants.items())
        digest = _digest(self._source, tuple(self._headers(constants).values()))
        key = f"{self._symbol}@{digest}.sm_{capability(torch._C._cuda_getDevice())}a({said})"
        kinds = tuple(("const", value) for value in constants.values())
        return Variant(key, self._module, self._name, tuple(constants), kinds, (threads, shared))

    def compile(self, variant: Variant, capability: int) -> tuple[Binary, bytes]:
        """Needs NVRTC and no GPU. Raises EngineError with what the compiler said."""
        constants = {n: value for n, (_, value) in zip(variant.names, variant.kinds, strict=True)}
        defined = [f"-D{name}={value}" for name, value in constants.items()]
        cubin = compiled(self._source.read_text(), self._headers(constants), defined, capability)
        threads, shared = variant.options
        binary = Binary(
            key=variant.key,
            symbol=self._symbol,
            threads=threads,
            shared=shared,
            params=self._params,
            launch_pdl=True,
            offset=0,
            size=0,
        )
        return binary, cubin


def compiled(source: str, headers: Mapping[str, str], options: Sequence[str], capability: int) -> bytes:
    """Machine code for one architecture, with its own instructions ("sm_90a")."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise EngineError(
            f"a CUDA source needs NVRTC, and `from cuda.bindings import nvrtc` failed ({error}); "
            "install cuda-python"
        ) from error

    def done(answer: tuple[Any, ...], call: str) -> Any:
        code, *rest = answer
        if code.value:
            raise EngineError(f"{call} failed: {code.name}")
        return rest[0] if rest else None

    texts, names = ([each.encode() for each in some] for some in (headers.values(), headers))
    program = done(
        nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", len(texts), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        given = [f"--gpu-architecture=sm_{capability}a", "--std=c++17", "-default-device", *options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(given), [each.encode() for each in given])
        if code.value:
            said = bytearray(done(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
            done(nvrtc.nvrtcGetProgramLog(program, said), "nvrtcGetProgramLog")
            lines = said.rstrip(b"\0").decode(errors="replace").strip()
            raise EngineError(f"NVRTC: {code.name} with {' '.join(options)}: {lines[-2000:]}")
        cubin = bytearray(done(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        done(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


@cache
def _digest(path: Path, texts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join([path.read_text(), *texts]).encode()).hexdigest()[:12]


class Matrix(NamedTuple):
    """Rows of 16-bit values in GPU memory: what a map of it says."""

    address: int
    rows: int
    columns: int
    stride: int  # values from one row to the next
    dtype: torch.dtype


def can_map(matrix: Matrix) -> bool:
    """The copy engine wants addresses and rows that begin at multiples of 16 bytes, and some values."""
    dense = matrix.stride * 2 % 16 == 0 and matrix.address % 16 == 0
    return dense and matrix.dtype in _TYPES and matrix.rows > 0 and matrix.columns > 0


@lru_cache(maxsize=1 << 14)
def matrix_map(matrix: Matrix, box_rows: int) -> bytes:
    """A CUtensorMap for boxes of `box_rows` rows by 64 columns, swizzled by 128 bytes."""
    shape, box = (matrix.columns, matrix.rows), (_ROW // 2, box_rows)
    return box_map(Boxes(matrix.address, shape, (matrix.stride,), box, matrix.dtype))


class Boxes(NamedTuple):
    """16-bit values in GPU memory and what of them is copied at once; the innermost dimension comes first."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # values from one to the next, of all dimensions but the innermost
    box: tuple[int, ...]  # its innermost side is 64 values, the swizzle's 128 bytes
    dtype: torch.dtype


@lru_cache(maxsize=1 << 14)
def box_map(boxes: Boxes) -> bytes:
    """A CUtensorMap for the copy engine. What lies outside of the shape is read as zeros.

    EngineError: the driver refused it.
    """
    room = (ctypes.c_char * (2 * _MAP_BYTES))()
    at = -(-ctypes.addressof(room) // 64) * 64  # the driver wants it aligned
    rank = len(boxes.shape)
    code = ctypes.PyDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _TYPES[boxes.dtype],
        rank,
        ctypes.c_void_p(boxes.address),
        (ctypes.c_uint64 * rank)(*boxes.shape),
        (ctypes.c_uint64 * (rank - 1))(*(stride * 2 for stride in boxes.strides)),
        (ctypes.c_uint32 * rank)(*boxes.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    if code:
        raise EngineError(f"cuTensorMapEncodeTiled failed with {code} for {boxes}")
    return ctypes.string_at(at, _MAP_BYTES)
