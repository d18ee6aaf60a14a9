"""`VmmDriver` over the memory of a Linux host: one sparse memfd; a handle is a chunk of it.

create = fallocate, so that exhaustion is an error there and not a SIGBUS at first touch; map = mmap over the
reserved range; unmap = mmap of inaccessible memory; release = a hole punched into the file.
A chunk sits in the file at the offset of the address that it is made for: the kernel then joins neighbouring
mappings into one, and a large pool stays far from `vm.max_map_count`.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import resource
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.runtime.memory.vmm import VmmError, VmmOutOfMemory

DEFAULT_GRANULARITY = 64 << 10
"""Bytes. Larger ones gain nothing: huge pages are off for memfd by default (shmem_enabled=never)."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_ADDRESS_SPACE = 1 << 47  # offsets below belong to addresses, those above to chunks made for no address
_PIECE_BYTES = (
    1 << 20
)  # a signal undoes a whole fallocate: 0.25 ms can be repeated under any profiler's timer
_EXHAUSTED = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EAGAIN)


@dataclass(slots=True)
class _Chunk:
    offset: int  # in the memfd, bytes
    size: int
    mappings: int = 0
    is_released: bool = False


class HostVmm:
    """Virtual memory of this process. Safe to call from several threads. Not usable in a forked child."""

    name = "host"
    device = torch.device("cpu")
    is_elastic = True
    creates_zeroed = True

    def __init__(self, granularity: int = DEFAULT_GRANULARITY) -> None:
        if granularity < mmap.PAGESIZE or granularity & (granularity - 1):
            raise ValueError(
                f"granularity={granularity}: must be a power of two, at least a page ({mmap.PAGESIZE})"
            )
        self.granularity = granularity
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._fd = -1
        self._chunks: dict[int, _Chunk] = {}
        self._offsets: list[tuple[int, int]] = []  # (offset, size) of all chunks in the file, sorted
        self._mappings: dict[int, tuple[int, int]] = {}  # address -> (size, handle)
        self._next_handle = 1
        self._next_offset = _ADDRESS_SPACE

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def unavailable_reason(self) -> str | None:
        """Why memory cannot be mapped here: not Linux, memfd forbidden, or a file size limit is set."""
        if not sys.platform.startswith("linux"):
            return f"it needs Linux (memfd and fallocate), this is {sys.platform}"
        if sys.maxsize < 1 << 32:
            return "it needs a 64-bit Python"
        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return "a file size limit is set (`ulimit -f` must be unlimited)"
        try:
            with self._lock:
                self._open()
        except VmmError as error:
            return str(error)
        return None

    @property
    def live_handles(self) -> int:
        """Handles that hold memory: created and not released, or still mapped."""
        return len(self._chunks)

    @property
    def physical_bytes(self) -> int:
        """Bytes of all live handles."""
        return sum(size for _, size in self._offsets)

    def reserve(self, size: int) -> int:
        """Reserve addresses, aligned to the granularity or to 2 MiB, whichever is more."""
        self._check(size, "size")
        align = max(self.granularity, 2 << 20)
        got = _mmap(
            0, size + align, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )
        base = -(-got // align) * align
        for start, end in ((got, base), (base + size, got + size + align)):
            if end > start:
                _munmap(start, end - start)
        return base

    def free_reserved(self, address: int, size: int) -> None:
        """Give a whole reservation back."""
        self._check(address, "address")
        self._check(size, "size")
        with self._lock:
            held = sum(address <= a < address + size for a in self._mappings)
        if held:
            raise VmmError(
                f"free_reserved({address:#x}, {size}): {held} mappings are still in it; unmap them first"
            )
        _munmap(address, size)

    def create(self, size: int, *, at: int | None = None) -> int:
        """Allocate `size` zeroed bytes.

        0.25 ms per MiB, and as much again at first touch (2 vCPU Xeon, Linux 6.18, 64 KiB to 2 MiB at once).
        """
        self._check(size, "size")
        if at is not None:
            self._check(at, "at")
        with self._lock:
            self._open()
            offset = self._place(size, at)
            self._allocate(offset, size)
            bisect.insort(self._offsets, (offset, size))
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._chunks[handle] = _Chunk(offset, size)
            return handle

    def release(self, handle: int) -> None:
        """Give a handle back; its memory goes when its last mapping goes."""
        with self._lock:
            chunk = self._chunk(handle)
            if not chunk.mappings:
                self._drop(handle, chunk)
            chunk.is_released = True

    def map(self, address: int, size: int, handle: int) -> None:
        """Map the whole chunk at a reserved, unmapped address, without access."""
        self._check(address, "address")
        with self._lock:
            chunk = self._chunk(handle)
            if size != chunk.size:
                raise VmmError(
                    f"map: handle {handle} has {chunk.size} bytes, asked to map {size}; map all of it"
                )
            if address in self._mappings:
                raise VmmError(f"map({address:#x}): something is mapped there already")
            _mmap(address, size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, self._fd, chunk.offset)
            chunk.mappings += 1
            self._mappings[address] = (size, handle)

    def set_access(self, address: int, size: int) -> None:
        """Allow reading and writing."""
        with self._lock:
            at = address
            while at < address + size and at in self._mappings:
                at += self._mappings[at][0]
            if at != address + size:
                raise VmmError(f"set_access({address:#x}, {size}): not exactly a run of whole mappings")
            _call("mprotect", address, size, mmap.PROT_READ | mmap.PROT_WRITE)

    def unmap(self, address: int, size: int) -> None:
        """Take one mapping away; the addresses stay reserved and fault when touched."""
        self._check_process()
        with self._lock:
            if self._mappings.get(address, (0, 0))[0] != size:
                raise VmmError(f"unmap({address:#x}, {size}): no mapping of that address and size")
            chunk = self._chunks[self._mappings[address][1]]
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _mmap(address, size, _PROT_NONE, flags, -1, 0)
            _, handle = self._mappings.pop(address)
            chunk.mappings -= 1
            if chunk.is_released and not chunk.mappings:
                self._drop(handle, chunk)

    def quiesce(self) -> None:
        """Nothing to wait for: work on the host is over when its call returns."""

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Set (address, size) spans to zero."""
        for address, size in spans:
            self.tensor(address, size, None).zero_()

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """A uint8 tensor [size] over addresses, mapped or not; its storage keeps `owner` alive."""
        kind: Any = type("_Window", (ctypes.c_char * size,), {})  # Any: ctypes classes made at run time
        window = kind.from_address(address)
        window.owner = owner
        return torch.frombuffer(window, dtype=torch.uint8)

    def mapped_bytes(self, address: int, size: int) -> int:
        """Bytes of the range that are mapped; mappings that stick out count for their part inside."""
        end = address + size
        return sum(max(0, min(end, a + n) - max(address, a)) for a, (n, _) in list(self._mappings.items()))

    def _place(self, size: int, at: int | None) -> int:
        if at is not None and at + size <= _ADDRESS_SPACE:
            i = bisect.bisect_left(self._offsets, (at, 0))
            is_free_before = i == 0 or sum(self._offsets[i - 1]) <= at
            is_free_after = i == len(self._offsets) or self._offsets[i][0] >= at + size
            if is_free_before and is_free_after:
                return at
        offset, self._next_offset = self._next_offset, self._next_offset + size
        return offset

    def _allocate(self, offset: int, size: int) -> None:
        try:
            for at in range(offset, offset + size, _PIECE_BYTES):
                _fallocate(self._fd, 0, at, min(_PIECE_BYTES, offset + size - at))
        except VmmError:
            _fallocate(self._fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, size)
            raise

    def _drop(self, handle: int, chunk: _Chunk) -> None:
        _fallocate(self._fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, chunk.offset, chunk.size)
        del self._chunks[handle]
        del self._offsets[bisect.bisect_left(self._offsets, (chunk.offset, chunk.size))]

    def _chunk(self, handle: int) -> _Chunk:
        self._check_process()
        chunk = self._chunks.get(handle)
        if chunk is None or chunk.is_released:
            raise VmmError(f"handle {handle}: not a live handle of this driver")
        return chunk

    def _open(self) -> None:
        self._check_process()
        if self._fd < 0:
            try:
                self._fd = os.memfd_create("ostinato", os.MFD_CLOEXEC)
            except OSError as error:
                raise VmmError(f"memfd_create failed: {os.strerror(error.errno or 0)}") from error

    def _check(self, value: int, what: str) -> None:
        self._check_process()
        if value <= 0 or value % self.granularity:
            raise VmmError(
                f"{what}={value}: must be a positive multiple of the granularity, {self.granularity} bytes"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise VmmError(
                f"memory of process {self._pid} was used in its forked child {os.getpid()}; use spawn"
            )


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, word]
    libc.mprotect.argtypes = [ctypes.c_void_p, word, ctypes.c_int]
    if hasattr(libc, "fallocate"):
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


_LIBC = _libc() if os.name == "posix" else None


def _error(call: str, size: int) -> VmmError:
    code = ctypes.get_errno()
    kind = VmmOutOfMemory if code in _EXHAUSTED else VmmError
    hint = "; see `ulimit -v` and vm.max_map_count" if code == errno.ENOMEM else ""
    return kind(f"{call} of {size} bytes failed: {os.strerror(code)}{hint}")


def _mmap(address: int, size: int, prot: int, flags: int, fd: int, offset: int) -> int:
    got = _LIBC.mmap(address or None, size, prot, flags, fd, offset)  # type: ignore[union-attr]  # Linux only
    if got == _MAP_FAILED:
        raise _error("mmap", size)
    return int(got)


def _munmap(address: int, size: int) -> None:
    _call("munmap", address, size)


def _call(name: str, address: int, size: int, *rest: int) -> None:
    if getattr(_LIBC, name)(address, size, *rest) != 0:
        raise _error(name, size)


def _fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    while _LIBC.fallocate(fd, mode, offset, size) != 0:  # type: ignore[union-attr]  # Linux only
        if ctypes.get_errno() != errno.EINTR:  # a signal: the kernel has undone its work
            raise _error("fallocate", size)
