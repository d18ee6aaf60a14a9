"""Launching machine code through the driver: arguments packed into one buffer, one call.

Several engines of a process may launch the same variant: a launch is packed and handed over under a lock, and
modules are loaded for each GPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from ostinato.errors import EngineError
from ostinato.ops import kernel_store
from ostinato.ops.kernel_store import Binary

_PACKED = {"i32": "i4x", "i64": "q", "fp32": "f4x", "ptr": "Q", "map": "128s"}  # of 8 bytes but the last
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CARVEOUT = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_FULL = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SHARED_WITHOUT_ASKING = 48 << 10  # bytes of shared memory that a kernel may use without an attribute


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("gridDimX", ctypes.c_uint),
        ("gridDimY", ctypes.c_uint),
        ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint),
        ("blockDimY", ctypes.c_uint),
        ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8 bytes, a union of 64 bytes that begins with an int."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


@cache
def _launch_kernel_ex() -> Any:
    """cuLaunchKernelEx of the driver. The interpreter stays locked: another thread would take it for long."""
    function = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


class Launcher:
    """A function loaded on a GPU, with its parameter buffer: packs arguments and calls the driver.

    Raises torch.OutOfMemoryError on a full device, for any other refusal of the driver EngineError.
    """

    def __init__(self, binary: Binary, cubin: bytes, device: int) -> None:
        """`device` is the current one."""
        from cuda.bindings import driver

        self._device, self._lock = device, threading.Lock()
        self._driver, self._enter = driver, _launch_kernel_ex()
        self._name, self._carveout = binary.symbol, kernel_store.STORE.carveout
        module = _done(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        self._module, self._cubin = module, cubin
        self._function = _done(driver.cuModuleGetFunction(module, binary.symbol.encode()), "getFunction")
        if binary.shared > _SHARED_WITHOUT_ASKING:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _done(driver.cuFuncSetAttribute(self._function, most, binary.shared), "cuFuncSetAttribute")
        codes = [_PACKED[kind] for kind in binary.params]
        sizes = [struct.calcsize(f"<{code}") for code in codes]
        self._values = ctypes.create_string_buffer(sum(sizes))
        at = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(codes))(
            *(at + end - size for end, size in zip(accumulate(sizes), sizes, strict=True))
        )
        self._pack = struct.Struct("<" + "".join(codes)).pack_into
        self._attributes = (_Attribute * 2)(
            _Attribute(_CARVEOUT, 0, self._carveout), _Attribute(_PROGRAMMATIC, 0, 1)
        )
        self._config = _Config(
            blockDimX=binary.threads, blockDimY=1, blockDimZ=1, sharedMemBytes=binary.shared
        )
        self._config.attrs = ctypes.addressof(self._attributes)
        self._config.numAttrs = 2 if binary.launch_pdl else 1
        self._call = (
            ctypes.c_void_p(ctypes.addressof(self._config)),
            ctypes.c_void_p(int(self._function)),
            ctypes.c_void_p(ctypes.addressof(self._pointers)),
            None,
        )
        self._grid: Sequence[int] = ()
        self._stream = -1  # none

    def __call__(self, grid: Sequence[int], ready: Sequence[Any]) -> None:
        """`ready`: integers, floats, addresses and maps (bytes), in the order of the parameters."""
        with self._lock:  # another engine of this process may launch the same variant
            self._pack(self._values, 0, *ready)
            config = self._config
            if grid != self._grid:
                config.gridDimX = grid[0]
                config.gridDimY = grid[1] if len(grid) > 1 else 1
                config.gridDimZ = grid[2] if len(grid) > 2 else 1
                self._grid = tuple(grid)
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            if stream != self._stream:
                config.hStream = self._stream = stream
            if kernel_store.STORE.carveout != self._carveout:
                self._attributes[0].value = self._carveout = kernel_store.STORE.carveout
            code = self._enter(*self._call)
        if code:
            name = self._driver.CUresult(code).name
            raise _failure(f"launch of {self._name} with grid {tuple(grid)}", code, name)
        kernel_store.STORE.launches += 1


def _done(answer: tuple[Any, ...], call: str) -> Any:
    code, *rest = answer
    if code.value:
        raise _failure(call, code.value, code.name)
    return rest[0] if rest else None


def _failure(what: str, code: int, name: str) -> Exception:
    """A full device is told as torch tells it: who captures or serves there goes on without."""
    kind = torch.OutOfMemoryError if code == _FULL else EngineError
    return kind(f"{what} failed: {name}")
