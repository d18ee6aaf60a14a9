"""`VmmDriver`: virtual memory of one device as a few calls, so that one `ElasticBuffer` serves every device.

An address range is reserved once, at no cost. Physical memory is created as handles and mapped under the
range piece by piece; the address never changes. Drivers: `vmm_cuda` (NVIDIA), `vmm_host` (Linux), `vmm_plain`
(anywhere, cannot grow); `handle_pool` makes the handles of another driver beforehand. What physical memory
is like (device, shareable or not) is a matter of a driver's constructor, not of these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ostinato.errors import EngineError


class VmmError(EngineError):
    """A driver call failed. Whoever made several calls has undone them before this is raised."""


class VmmOutOfMemory(VmmError):
    """There is no memory (or no address space) left; asking for less, or later, may succeed."""


class MemoryRegistered(VmmError):
    """A connector has registered the memory: it may not be taken away, and nothing was."""


class VmmDriver(Protocol):
    """Virtual memory of one device. Sizes and addresses are bytes and multiples of `granularity`.

    Every call either does all of its work or raises `VmmError` and has changed nothing.
    Calls on different ranges may come from different threads; calls on one range may not.
    """

    @property
    def name(self) -> str:
        """What logs call it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        ...

    @property
    def granularity(self) -> int:
        """Bytes of the smallest piece; a power of two."""
        ...

    @property
    def is_elastic(self) -> bool:
        """False: a reservation costs its full size at once, and `release` gives nothing back."""
        ...

    @property
    def creates_zeroed(self) -> bool:
        """True if memory of a new handle reads as zero."""
        ...

    def unavailable_reason(self) -> str | None:
        """Why this driver cannot be used here; None if it can."""
        ...

    def reserve(self, size: int) -> int:
        """Reserve addresses without memory; return the first one."""
        ...

    def free_reserved(self, address: int, size: int) -> None:
        """Give a whole reservation back; nothing may be mapped in it any more."""
        ...

    def create(self, size: int, *, at: int | None = None) -> int:
        """Allocate physical memory and return its handle. `at` hints where it will be mapped."""
        ...

    def release(self, handle: int) -> None:
        """Give a handle back. Its memory is free once it is mapped nowhere either."""
        ...

    def map(self, address: int, size: int, handle: int) -> None:
        """Put the whole of a handle at an address; touching it is allowed after `set_access` only."""
        ...

    def set_access(self, address: int, size: int) -> None:
        """Make neighbouring whole mappings readable and writable."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Take away exactly one mapping. Touching the range is a fault from now on."""
        ...

    def quiesce(self) -> None:
        """Return when no work given to the device before can touch memory; called before any `unmap`."""
        ...

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Set mapped (address, size) spans, not of granules, to zero; done for everybody when it returns."""
        ...

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """A uint8 tensor [size] over addresses, mapped or not. Its storage keeps `owner` alive."""
        ...

    def mapped_bytes(self, address: int, size: int) -> int:
        """Bytes of the range that are mapped, by the driver's own books. For checks, not for speed."""
        ...
