"""`HandlePool`: a driver with physical memory made beforehand, so that growth only has to map it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from ostinato.runtime.memory.vmm import VmmDriver, VmmError, VmmOutOfMemory


class HandlePool:
    """Passes everything on to `driver`, but `create` first takes a spare handle of the size.

    Spare handles are fresh ones; what is released goes back to the device at once. They hold memory of the
    device: `spare_bytes` counts it, `trim` gives it back, and a device that is full gets it back by itself.
    Safe to call from several threads.
    """

    is_elastic = True

    def __init__(self, driver: VmmDriver) -> None:
        self.driver = driver
        self.name = driver.name
        self.device = driver.device
        self.creates_zeroed = driver.creates_zeroed
        self._lock = threading.Lock()
        self._spare: dict[int, list[int]] = {}  # bytes of a handle -> handles

    @property
    def granularity(self) -> int:
        """Bytes of the smallest piece."""
        return self.driver.granularity

    @property
    def spare_bytes(self) -> int:
        """Bytes of all spare handles."""
        with self._lock:
            return sum(size * len(handles) for size, handles in self._spare.items())

    def prepare(self, wanted: Mapping[int, int]) -> None:
        """Have at least so many spare handles of each size (bytes -> count).

        A full device is no error: there are fewer then.
        """
        for size, count in wanted.items():
            while True:
                with self._lock:
                    if len(self._spare.get(size, ())) >= count:
                        break
                try:
                    handle = self.driver.create(size)
                except VmmOutOfMemory:
                    return
                with self._lock:
                    self._spare.setdefault(size, []).append(handle)

    def missing_bytes(self, wanted: Mapping[int, int]) -> int:
        """What `prepare` would take from the device."""
        with self._lock:
            have = Counter({size: len(handles) for size, handles in self._spare.items()})
        return sum(size * max(0, count - have[size]) for size, count in wanted.items())

    def trim(self) -> None:
        """Release all spare handles. Raises `VmmError` if the driver refuses; that handle stays spare."""
        while True:
            with self._lock:
                if not self._spare:
                    return
                size = max(self._spare)
                handle = self._spare[size].pop()
                if not self._spare[size]:
                    del self._spare[size]
            try:
                self.driver.release(handle)
            except VmmError:
                with self._lock:
                    self._spare.setdefault(size, []).append(handle)
                raise

    def create(self, size: int, *, at: int | None = None) -> int:
        """A spare handle, or a new one. On a full device spare handles of other sizes make room."""
        with self._lock:
            handles = self._spare.get(size)
            if handles:
                handle = handles.pop()
                if not handles:
                    del self._spare[size]
                return handle
        try:
            return self.driver.create(size, at=at)
        except VmmOutOfMemory:
            if not self.spare_bytes:
                raise
            self.trim()
            return self.driver.create(size, at=at)

    def unavailable_reason(self) -> str | None:
        """Why the driver cannot be used here; None if it can."""
        return self.driver.unavailable_reason()

    def reserve(self, size: int) -> int:
        """Reserve addresses."""
        return self.driver.reserve(size)

    def free_reserved(self, address: int, size: int) -> None:
        """Give a reservation back."""
        self.driver.free_reserved(address, size)

    def release(self, handle: int) -> None:
        """Give a handle back to the device."""
        self.driver.release(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        """Put the whole of a handle at an address."""
        self.driver.map(address, size, handle)

    def set_access(self, address: int, size: int) -> None:
        """Make whole mappings readable and writable."""
        self.driver.set_access(address, size)

    def unmap(self, address: int, size: int) -> None:
        """Take away exactly one mapping."""
        self.driver.unmap(address, size)

    def quiesce(self) -> None:
        """Wait for work that can touch memory."""
        self.driver.quiesce()

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Set spans to zero."""
        self.driver.zero(spans)

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """A uint8 tensor over addresses."""
        return self.driver.tensor(address, size, owner)

    def mapped_bytes(self, address: int, size: int) -> int:
        """Bytes of the range that are mapped."""
        return self.driver.mapped_bytes(address, size)
