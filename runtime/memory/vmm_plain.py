"""The driver for devices without virtual memory calls: a reservation is one plain allocation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from ostinato.runtime.memory.vmm import VmmDriver, VmmError, VmmOutOfMemory

log = logging.getLogger(__name__)


def usable_driver(driver: VmmDriver) -> VmmDriver:
    """`driver`, or a `PlainVmm` on its device after a warning that names the reason."""
    reason = driver.unavailable_reason()
    if reason is None:
        return driver
    log.warning(
        "KV memory cannot grow or shrink: %s. All of it is allocated at start (see kv.initial_mib)", reason
    )
    return PlainVmm(driver.device)


class PlainVmm:
    """Same calls, but memory exists from `reserve` to `free_reserved`; the calls between only keep books."""

    name = "plain"
    is_elastic = False
    creates_zeroed = False  # memory that was shrunk away and comes back holds what it held
    granularity = 4096

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._lock = threading.Lock()
        self._blocks: dict[int, torch.Tensor] = {}
        self._mappings: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._next_handle = 1

    @property
    def live_handles(self) -> int:
        """Handles created and not released."""
        return len(self._handles)

    def unavailable_reason(self) -> str | None:
        """Always usable."""
        return None

    def reserve(self, size: int) -> int:
        """Allocate `size` bytes, zeroed."""
        try:
            raw = torch.zeros(size + self.granularity, dtype=torch.uint8, device=self.device)
        except (RuntimeError, MemoryError) as error:  # torch: "not enough memory" is a RuntimeError
            raise VmmOutOfMemory(f"allocation of {size} bytes on {self.device} failed: {error}") from error
        self._wait()  # streams that use it would not know of the zeros that are on their way
        base = -(-raw.data_ptr() // self.granularity) * self.granularity
        with self._lock:
            self._blocks[base] = raw[base - raw.data_ptr() :][:size]
        return base

    def free_reserved(self, address: int, size: int) -> None:
        """Give the allocation back; it goes when no tensor uses it."""
        with self._lock:
            if self._blocks.get(address, torch.empty(0)).numel() != size:
                raise VmmError(f"free_reserved({address:#x}, {size}): no such reservation")
            del self._blocks[address]

    def create(self, size: int, *, at: int | None = None) -> int:
        """Keep books only."""
        with self._lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._handles[handle] = size
            return handle

    def release(self, handle: int) -> None:
        """Keep books only."""
        with self._lock:
            if self._handles.pop(handle, None) is None:
                raise VmmError(f"handle {handle}: not a live handle of this driver")

    def map(self, address: int, size: int, handle: int) -> None:
        """Keep books only."""
        with self._lock:
            if self._handles.get(handle) != size or address in self._mappings:
                raise VmmError(f"map({address:#x}, {size}): wrong handle {handle}, or mapped already")
            self._mappings[address] = size

    def set_access(self, address: int, size: int) -> None:
        """Nothing to do."""

    def unmap(self, address: int, size: int) -> None:
        """Keep books only."""
        with self._lock:
            if self._mappings.get(address) != size:
                raise VmmError(f"unmap({address:#x}, {size}): no mapping of that address and size")
            del self._mappings[address]

    def quiesce(self) -> None:
        """Nothing to do: no memory is ever taken away."""

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Set (address, size) spans to zero."""
        for address, size in spans:
            self.tensor(address, size, None).zero_()
        self._wait()

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """A part of the allocation; the allocation lives as long as the tensor, so `owner` is not needed."""
        with self._lock:
            for base, block in self._blocks.items():
                if base <= address and address + size <= base + block.numel():
                    return block[address - base :][:size]
        raise VmmError(f"tensor({address:#x}, {size}): not inside a reservation")

    def mapped_bytes(self, address: int, size: int) -> int:
        """Bytes of the range that the books call mapped."""
        end = address + size
        return sum(max(0, min(end, a + n) - max(address, a)) for a, n in list(self._mappings.items()))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
