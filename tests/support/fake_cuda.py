"""`cuda.bindings.driver` without a GPU: the calls that `CudaVmm` makes, over the host driver's memory."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from ostinato.runtime.memory.vmm import VmmError
from ostinato.runtime.memory.vmm_host import HostVmm

GRANULE = 64 << 10
RETAINED = 1 << 60  # the handle that asking for the memory at an address gives


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110


class FakeCuda:
    """Strict like the driver: misuse is `CUDA_ERROR_INVALID_VALUE`. New memory holds 0xAB. One device.

    `calls` has the names of all calls; `fail(name, k)` makes the k-th call of that name from now on fail.
    """

    CUresult = Result
    CUdevice_attribute = Attribute
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUevent_flags = SimpleNamespace(
        CU_EVENT_BLOCKING_SYNC=SimpleNamespace(value=1), CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2)
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))

    def __init__(self, *, total: int = 1 << 40, attributes: tuple[int, ...] = (102, 110)) -> None:
        self.host = HostVmm(GRANULE)
        self.total = total
        self.attributes = attributes
        self.calls: list[str] = []
        self.capturing = False
        self.refused_properties: list[tuple[bool, bool]] = []  # (shareable, rdma) that cannot be made
        self._counts: Counter[str] = Counter()
        self._failing: dict[tuple[str, int], Result] = {}
        self._files: dict[int, int] = {}
        self._imported: list[int] = []

    def fail(self, name: str, k: int = 1, result: Result = Result.CUDA_ERROR_INVALID_VALUE) -> None:
        self._failing[name, self._counts[name] + k] = result

    def heal(self) -> None:
        self._failing.clear()

    def count(self, name: str) -> int:
        return self._counts[name]

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._run("cuInit", lambda: None)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._run("cuDeviceGet", lambda: index)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self._run("cuDeviceGetAttribute", lambda: int(attribute in self.attributes))

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self._run("cuDevicePrimaryCtxRetain", lambda: 77)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        return self._run("cuCtxSetCurrent", lambda: None)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._run("cuCtxSynchronize", lambda: None)

    def cuGetErrorString(self, result: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, Result(result).name.encode()

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._run("cuMemGetInfo", lambda: (self.total - self.host.physical_bytes, self.total))

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        return self._run("cuMemGetAllocationGranularity", lambda: GRANULE)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        return self._run("cuMemAddressReserve", lambda: self.host.reserve(size))

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        return self._run("cuMemAddressFree", lambda: self.host.free_reserved(address, size))

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        wish = (bool(properties.requestedHandleTypes), bool(properties.allocFlags.gpuDirectRDMACapable))
        if wish in self.refused_properties:
            return (Result.CUDA_ERROR_NOT_SUPPORTED, None)
        if self.host.physical_bytes + size > self.total:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
        return self._run("cuMemCreate", lambda: self._created(size))

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        return self._run("cuMemRelease", lambda: self._released(handle))

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        return self._run("cuMemMap", lambda: self.host.map(address, size, handle))

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        return self._run("cuMemSetAccess", lambda: self.host.set_access(address, size))

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        return self._run("cuMemUnmap", lambda: self.host.unmap(address, size))

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, ...]:
        is_there = self.host.mapped_bytes(address, 1) == 1
        return (Result.CUDA_SUCCESS, RETAINED) if is_there else (Result.CUDA_ERROR_INVALID_VALUE, None)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        return self._run("cuMemExportToShareableHandle", lambda: self._exported(handle))

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[Any, ...]:
        return self._run(
            "cuMemImportFromShareableHandle",
            lambda: self._imported.append(self._files[fd]) or self._files[fd],
        )

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        return self._run("cuMemsetD8Async", lambda: ctypes.memset(address, value, size) and None)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return self._run("cuStreamCreate", lambda: 5)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self._run("cuStreamSynchronize", lambda: None)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return self._run("cuStreamIsCapturing", lambda: int(self.capturing))

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return self._run("cuEventCreate", lambda: 6)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return self._run("cuEventRecord", lambda: None)

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return self._run("cuEventSynchronize", lambda: None)

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._run("cuEventDestroy", lambda: None)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(
            type=0,
            location=SimpleNamespace(type=0, id=-1),
            requestedHandleTypes=0,
            allocFlags=SimpleNamespace(gpuDirectRDMACapable=0),
        )

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(location=None, flags=0)

    def _created(self, size: int) -> int:
        handle = self.host.create(size)
        address = self.host.reserve(size)
        self.host.map(address, size, handle)
        self.host.set_access(address, size)
        ctypes.memset(address, 0xAB, size)
        self.host.unmap(address, size)
        self.host.free_reserved(address, size)
        return handle

    def _released(self, handle: int) -> None:
        if handle in self._imported:
            self._imported.remove(handle)  # one of two references
        elif handle != RETAINED:
            self.host.release(handle)

    def _exported(self, handle: int) -> int:
        fd = os.open(os.devnull, os.O_RDONLY)
        self._files[fd] = handle
        return fd

    def _run(self, name: str, call: Callable[[], Any]) -> tuple[Any, ...]:
        self.calls.append(name)
        self._counts[name] += 1
        failing = self._failing.get((name, self._counts[name]))
        if failing is not None:
            return (failing, None)
        try:
            value = call()
        except VmmError:
            return (Result.CUDA_ERROR_INVALID_VALUE, None)
        if value is None:
            return (Result.CUDA_SUCCESS,)
        return (Result.CUDA_SUCCESS, *value) if isinstance(value, tuple) else (Result.CUDA_SUCCESS, value)
