"""Calls of a CUDA driver through `cuda.bindings.driver`: first use, the context of each thread, errors."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, NamedTuple

import torch

from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory

log = logging.getLogger(__name__)

_MIB = 1 << 20


class CudaCalls:
    """One device of the driver in this process. Opened at first use; safe to call from several threads.

    Any: the bindings have no types.
    """

    def __init__(self, device: torch.device, *, shareable: bool, api: Any = None) -> None:
        """`api` stands in for `cuda.bindings.driver`."""
        self.device = device
        self.api = api
        self._wants_sharing = shareable
        self._pid = os.getpid()
        self._opening = threading.Lock()
        self._thread = threading.local()  # .is_ready: the context is current there
        self._opened: Opened | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        """What a call gives besides its status, which is checked. Raises VmmError, VmmOutOfMemory."""
        self.enter()
        is_sized = name in ("cuMemCreate", "cuMemAddressReserve")
        return self._checked(name, getattr(self.api, name)(*arguments), arguments[0] if is_sized else None)

    def enter(self) -> None:
        """Make the context current in this thread: calls on events and streams need it."""
        self.check_process()
        opened = self.open()
        if not getattr(self._thread, "is_ready", False):
            self._checked("cuCtxSetCurrent", self.api.cuCtxSetCurrent(opened.context))
            self._thread.is_ready = True

    def open(self) -> Opened:
        """What first use made. Raises VmmError if the device cannot be used."""
        opened = self._opened
        if opened is None:
            with self._opening:
                self.check_process()
                opened = self._opened = self._opened or self._first_use()
        return opened

    def file_descriptor(self) -> Any:
        """The handle type of exported memory."""
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def check_process(self) -> None:
        """Raise VmmError in a forked child: a CUDA context does not follow there."""
        if os.getpid() != self._pid:
            raise VmmError(
                f"memory of process {self._pid} was used in its forked child {os.getpid()}; use spawn"
            )

    def _first_use(self) -> Opened:
        if self.api is None:
            if self.device.type != "cuda" or not torch.cuda.is_available():
                raise VmmError(f"torch sees no CUDA device (asked for {self.device})")
            torch.cuda.current_device()  # torch sets itself up first, in the context that is shared with it
            try:
                from cuda.bindings import driver
            except ImportError as error:
                raise VmmError(
                    f"cuda.bindings cannot be imported ({error}); pip install cuda-bindings"
                ) from error
            self.api = driver
        api, index = self.api, self.device.index or 0
        try:
            self._checked("cuInit", api.cuInit(0))
        except RuntimeError as error:  # the bindings, when there is no libcuda.so.1
            raise VmmError(f"no CUDA driver: {error}") from error
        device = self._checked("cuDeviceGet", api.cuDeviceGet(index))
        attributes = api.CUdevice_attribute

        def has(name: str) -> bool:
            attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
            return bool(self._checked(name, api.cuDeviceGetAttribute(attribute, device)))

        if not has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise VmmError(f"{self.device} has no virtual memory management")
        context = self._checked("cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(device))
        self._checked("cuCtxSetCurrent", api.cuCtxSetCurrent(context))
        self._thread.is_ready = True
        rdma = self._wants_sharing and has("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        wishes = [(True, True)] * rdma + [(True, False)] * self._wants_sharing + [(False, False)]
        for shareable, with_rdma in wishes:
            properties = self._properties(index, shareable, with_rdma)
            try:
                granularity = self._probe(properties)
                break
            except VmmError as error:
                if not shareable:
                    raise
                log.warning("KV memory: handles with RDMA=%s cannot be made: %s", with_rdma, error)
        if self._wants_sharing and not shareable:
            log.warning("KV memory cannot be shared with other processes or registered by a transfer engine")
        elif self._wants_sharing and not with_rdma:
            log.warning("KV memory can be shared, but not be read by RDMA: %s does not offer it", self.device)
        access = api.CUmemAccessDesc()
        access.location = properties.location
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flag = api.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        stream = int(self._checked("cuStreamCreate", api.cuStreamCreate(flag)))
        return Opened(context, properties, access, granularity, stream, shareable, with_rdma)

    def _properties(self, index: int, shareable: bool, with_rdma: bool) -> Any:
        api = self.api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        if shareable:
            properties.requestedHandleTypes = self.file_descriptor()
        properties.allocFlags.gpuDirectRDMACapable = int(with_rdma)
        return properties

    def _probe(self, properties: Any) -> int:
        """Bytes of a granule of such memory, after one was really made: attributes promise too much."""
        api = self.api
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = int(
            self._checked(
                "cuMemGetAllocationGranularity", api.cuMemGetAllocationGranularity(properties, minimum)
            )
        )
        handle = self._checked("cuMemCreate", api.cuMemCreate(size, properties, 0), size)
        self._checked("cuMemRelease", api.cuMemRelease(handle))
        return size

    def _checked(self, name: str, result: tuple[Any, ...], size: int | None = None) -> Any:
        """What a call gave besides its status; VmmError if the status is not success."""
        status, *values = result
        if int(status):
            what = name if size is None else f"{name} of {size / _MIB:g} MiB"
            _, text = self.api.cuGetErrorString(status)
            message = text.decode() if isinstance(text, bytes) else str(text)
            is_full = status == self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            raise (VmmOutOfMemory if is_full else VmmError)(f"{what} failed: {message} ({int(status)})")
        return values[0] if len(values) == 1 else values


class Opened(NamedTuple):
    """What is made at first use. Any: types of the bindings."""

    context: Any
    properties: Any
    access: Any
    granularity: int  # bytes
    stream: int  # for zeroing
    is_shareable: bool
    is_rdma_capable: bool
