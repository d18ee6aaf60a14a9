"""`VmmDriver` over the virtual memory calls of a CUDA driver (`cuda.bindings.driver`).

What the CUDA manual says and this file relies on: a handle may be released while it is mapped, its memory
goes with the last mapping; mapping needs no pause of kernels that use other parts of the range, unmapping
needs one (`quiesce`); new memory holds anything.

Nothing here may run while a stream of this process is captured: the driver would spoil the capture.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ostinato.runtime.memory.cuda_calls import CudaCalls
from ostinato.runtime.memory.vmm import VmmError
from ostinato.runtime.memory.window_tensor import window_tensor

_Mappings = dict[int, tuple[int, int]]  # address -> (bytes, handle)


class DeviceBytes(NamedTuple):
    """Memory of the device as its driver counts it."""

    free: int
    total: int


class CudaVmm:
    """Virtual memory of one GPU in this process. Safe to call from several threads; not in a forked child."""

    name = "cuda"
    is_elastic = True
    creates_zeroed = False

    def __init__(self, device: torch.device | str = "cuda:0", *, shareable: bool = False, api: Any = None):
        """Touches no device. `shareable`: handles can be exported (POSIX file descriptor) and, where the
        device can, read by RDMA; where they cannot be, a warning says why. `api` stands in for
        `cuda.bindings.driver` (Any: the package has no types).
        """
        self.device = torch.device(device)
        self._cuda = CudaCalls(self.device, shareable=shareable, api=api)
        self._lock = threading.Lock()  # of the books
        self._streams: list[int] = []
        self._handles: dict[int, int] = {}  # handle -> bytes; released ones are gone
        self._bases: list[int] = []  # of reservations, sorted
        self._mappings: dict[int, _Mappings] = {}  # by base

    def unavailable_reason(self) -> str | None:
        """No GPU, no `cuda-bindings`, or a device without virtual memory management."""
        try:
            self._cuda.open()
        except VmmError as error:
            return str(error)
        return None

    @property
    def granularity(self) -> int:
        """Bytes of the smallest piece: 2 MiB on an H200."""
        return self._cuda.open().granularity

    @property
    def is_shareable(self) -> bool:
        """Whether handles can be exported."""
        return self._cuda.open().is_shareable

    @property
    def is_rdma_capable(self) -> bool:
        """Whether a network card can read and write the memory (GPUDirect RDMA)."""
        return self._cuda.open().is_rdma_capable

    @property
    def live_handles(self) -> int:
        """Handles that hold memory: created and not released, or still mapped."""
        with self._lock:
            mapped = {handle for inside in self._mappings.values() for _, handle in inside.values()}
            return len(self._handles.keys() | mapped)

    def order_after(self, stream: int) -> None:
        """`quiesce` waits for this stream (`torch.cuda.Stream.cuda_stream`); without any, for the device."""
        with self._lock:
            if stream not in self._streams:
                self._streams.append(stream)

    def memory(self) -> DeviceBytes:
        """Free and total bytes of the device, other processes counted."""
        free, total = self._cuda.call("cuMemGetInfo")
        return DeviceBytes(int(free), int(total))

    def reserve(self, size: int) -> int:
        """Reserve addresses, aligned to the granularity."""
        self._check(size, "size")
        base = int(self._cuda.call("cuMemAddressReserve", size, self.granularity, 0, 0))
        with self._lock:
            bisect.insort(self._bases, base)
            self._mappings[base] = {}
        return base

    def free_reserved(self, address: int, size: int) -> None:
        """Give a whole reservation back."""
        with self._lock:
            held = len(self._mappings.get(address, ()))
        if held:
            raise VmmError(
                f"free_reserved({address:#x}, {size}): {held} mappings are still in it; unmap them first"
            )
        self._cuda.call("cuMemAddressFree", address, size)
        with self._lock:
            self._bases.remove(address)
            del self._mappings[address]

    def create(self, size: int, *, at: int | None = None) -> int:
        """Allocate `size` bytes of any content. `at` is of no use here."""
        self._check(size, "size")
        handle = int(self._cuda.call("cuMemCreate", size, self._cuda.open().properties, 0))
        with self._lock:
            self._handles[handle] = size
        return handle

    def release(self, handle: int) -> None:
        """Give a handle back; its memory goes when its last mapping goes."""
        size = self._size_of(handle)
        with self._lock:
            del self._handles[handle]  # before the call: another thread may get the same number right after
        try:
            self._cuda.call("cuMemRelease", handle)
        except VmmError:
            with self._lock:
                self._handles[handle] = size
            raise

    def map(self, address: int, size: int, handle: int) -> None:
        """Map the whole handle at a reserved, unmapped address, without access."""
        self._check(address, "address")
        created = self._size_of(handle)
        if size != created:
            raise VmmError(f"map: handle {handle} has {created} bytes, asked to map {size}; map all of it")
        with self._lock:
            mappings = self._around(address)
            if address in mappings:
                raise VmmError(f"map({address:#x}): something is mapped there already")
        self._cuda.call("cuMemMap", address, size, 0, handle, 0)
        with self._lock:
            mappings[address] = (size, handle)

    def set_access(self, address: int, size: int) -> None:
        """Allow this device to read and write."""
        with self._lock:
            at, mappings = address, self._around(address)
            while at < address + size and at in mappings:
                at += mappings[at][0]
        if at != address + size:
            raise VmmError(f"set_access({address:#x}, {size}): not exactly a run of whole mappings")
        self._cuda.call("cuMemSetAccess", address, size, [self._cuda.open().access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Take one mapping away; the addresses stay reserved, touching them is an error of the device."""
        self._cuda.check_process()
        with self._lock:
            mappings = self._around(address)
            if mappings.get(address, (0, 0))[0] != size:
                raise VmmError(f"unmap({address:#x}, {size}): no mapping of that address and size")
        self._cuda.call("cuMemUnmap", address, size)
        with self._lock:
            del mappings[address]

    def quiesce(self) -> None:
        """Wait for everything given so far to the streams of `order_after`, or to the device.

        An event is waited for, so that work queued later does not count. Raises VmmError while a stream is
        captured, and for what went wrong in a kernel before.
        """
        with self._lock:
            streams = tuple(self._streams)
        if not streams:
            self._cuda.call("cuCtxSynchronize")
            return
        for stream in streams:
            if int(self._cuda.call("cuStreamIsCapturing", stream)):
                raise VmmError("memory cannot be taken away while a graph is captured; wait for its end")
        flags = self._cuda.api.CUevent_flags
        event = self._cuda.call(
            "cuEventCreate",
            flags.CU_EVENT_BLOCKING_SYNC.value | flags.CU_EVENT_DISABLE_TIMING.value,  # sleeps, not spins
        )
        try:
            for stream in streams:
                self._cuda.call("cuEventRecord", event, stream)
                self._cuda.call("cuEventSynchronize", event)
        finally:
            self._cuda.call("cuEventDestroy", event)

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Set (address, size) spans to zero on a stream of the driver's own; done when it returns."""
        stream = self._cuda.open().stream
        for address, size in spans:
            self._cuda.call("cuMemsetD8Async", address, 0, size, stream)
        self._cuda.call("cuStreamSynchronize", stream)

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """A uint8 tensor [size] over addresses, mapped or not; its storage keeps `owner` alive."""
        self._cuda.check_process()
        return window_tensor(address, size, self.device, owner)

    def mapped_bytes(self, address: int, size: int) -> int:
        """Bytes of a part of one reservation that are mapped, parts of mappings counted as such."""
        end = address + size
        with self._lock:
            mappings = [(at, n) for at, (n, _) in self._around(address).items()]
        return sum(max(0, min(end, at + n) - max(address, at)) for at, n in mappings)

    def is_mapped(self, address: int) -> bool:
        """Whether the driver itself has memory at an address; for checks: two calls."""
        self._cuda.enter()
        error, handle = self._cuda.api.cuMemRetainAllocationHandle(address)
        if int(error):
            return False
        self._cuda.call("cuMemRelease", int(handle))
        return True

    def export_fd(self, handle: int) -> int:
        """A new file descriptor of a handle's memory, for another process; the caller closes it."""
        self._size_of(handle)
        if not self.is_shareable:
            raise VmmError("export_fd: handles of this driver are not shareable; make it with shareable=True")
        return int(self._cuda.call("cuMemExportToShareableHandle", handle, self._cuda.file_descriptor(), 0))

    def import_fd(self, fd: int, size: int) -> int:
        """A handle of memory that another process exported; `size` bytes, as created there.

        For memory of this process the driver may give the handle that it has: it is then released once.
        """
        self._check(size, "size")
        handle = int(self._cuda.call("cuMemImportFromShareableHandle", fd, self._cuda.file_descriptor()))
        with self._lock:
            is_known = handle in self._handles
            self._handles[handle] = size
        if is_known:
            self._cuda.call("cuMemRelease", handle)
        return handle

    def _around(self, address: int) -> _Mappings:
        """Mappings of the reservation that begins last before an address."""
        at = bisect.bisect_right(self._bases, address)
        if not at:
            raise VmmError(f"{address:#x}: not inside a reservation")
        return self._mappings[self._bases[at - 1]]

    def _size_of(self, handle: int) -> int:
        self._cuda.check_process()
        with self._lock:
            size = self._handles.get(handle)
        if size is None:
            raise VmmError(f"handle {handle}: not a live handle of this driver")
        return size

    def _check(self, value: int, what: str) -> None:
        granule = self.granularity
        if value <= 0 or value % granule:
            raise VmmError(f"{what}={value}: must be a positive multiple of the granularity, {granule} bytes")
