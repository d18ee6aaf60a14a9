"""A driver with strict books and no real device, and a wrapper that makes chosen driver calls fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ostinato.runtime.memory.vmm import VmmDriver, VmmError, VmmOutOfMemory

GARBAGE = 0xAB  # what memory of a new handle holds
ABSENT = 0xDD  # what a tensor shows where nothing is mapped
FAILING = ("create", "map", "set_access", "unmap", "release", "quiesce", "zero")


class ModelVmm:
    """Behaves like a GPU: new memory is garbage, misuse is an error, and `limit` bytes are all there is.

    `has_bytes=False` keeps books only (no tensors), for long random runs.
    """

    name = "model"
    device = torch.device("cpu")
    is_elastic = True
    creates_zeroed = False

    def __init__(self, granularity: int = 4, *, limit: int = 1 << 60, has_bytes: bool = True) -> None:
        self.granularity = granularity
        self.limit = limit
        self.has_bytes = has_bytes
        self.created = self.released = self.physical_bytes = 0
        self.handles: dict[int, tuple[int, torch.Tensor | None]] = {}  # size, bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # granule address -> (handle, start of its mapping)
        self.mappings: dict[int, tuple[int, int]] = {}  # address -> (size, handle)
        self.accessible: set[int] = set()  # granule addresses
        self.reservations: dict[int, tuple[int, torch.Tensor | None]] = {}
        self._next_address = 1 << 20

    def unavailable_reason(self) -> str | None:
        return None

    def reserve(self, size: int) -> int:
        self._aligned(size)
        base, self._next_address = self._next_address, self._next_address + size + self.granularity
        block = torch.full((size,), ABSENT, dtype=torch.uint8) if self.has_bytes else None
        self.reservations[base] = (size, block)
        return base

    def free_reserved(self, address: int, size: int) -> None:
        if self.reservations[address][0] != size or self.mapped_bytes(address, size):
            raise VmmError("free_reserved: wrong size, or still mapped")
        del self.reservations[address]

    def create(self, size: int, *, at: int | None = None) -> int:
        self._aligned(size)
        if self.physical_bytes + size > self.limit:
            raise VmmOutOfMemory(f"create of {size} bytes: the device is full")
        self.physical_bytes += size
        self.created += 1
        content = torch.full((size,), GARBAGE, dtype=torch.uint8) if self.has_bytes else None
        self.handles[self.created] = (size, content)
        return self.created

    def release(self, handle: int) -> None:
        if any(h == handle for _, h in self.mappings.values()):
            raise VmmError("release: still mapped")
        size, _ = self.handles.pop(handle)
        self.physical_bytes -= size
        self.released += 1

    def map(self, address: int, size: int, handle: int) -> None:
        self._aligned(address - min(self.reservations), size)
        if self.handles[handle][0] != size:
            raise VmmError("map: not the whole handle")
        granules = range(address, address + size, self.granularity)
        if any(g in self.mapped for g in granules):
            raise VmmError("map: something is mapped there")
        block = self._slice(address, size)
        if block is not None:
            block.copy_(self.handles[handle][1])
        self.mapped.update((g, (handle, address)) for g in granules)
        self.mappings[address] = (size, handle)

    def set_access(self, address: int, size: int) -> None:
        granules = range(address, address + size, self.granularity)
        if not all(g in self.mapped for g in granules):
            raise VmmError("set_access: not mapped")
        self.accessible.update(granules)

    def unmap(self, address: int, size: int) -> None:
        if self.mappings.get(address, (0, 0))[0] != size:
            raise VmmError("unmap: no such mapping")
        _, handle = self.mappings.pop(address)
        block = self._slice(address, size)
        if block is not None:
            self.handles[handle] = (size, block.clone())
            block.fill_(ABSENT)
        for granule in range(address, address + size, self.granularity):
            del self.mapped[granule]
            self.accessible.discard(granule)

    def quiesce(self) -> None:
        pass

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        for address, size in spans:
            self.tensor(address, size, None).zero_()

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        block = self._slice(address, size)
        assert block is not None, "this driver was made without bytes"
        return block

    def mapped_bytes(self, address: int, size: int) -> int:
        end = address + size
        return sum(size for start, (size, _) in self.mappings.items() if address <= start < end)

    def _slice(self, address: int, size: int) -> torch.Tensor | None:
        for base, (reserved, block) in self.reservations.items():
            if base <= address and address + size <= base + reserved:
                return None if block is None else block[address - base :][:size]
        raise VmmError("address outside of every reservation")

    def _aligned(self, *values: int) -> None:
        if any(value % self.granularity for value in values):
            raise VmmError(f"{values}: not multiples of {self.granularity}")


class FaultyDriver:
    """Passes calls on to a real driver, except those that it was told to fail; counts calls."""

    def __init__(self, inner: VmmDriver) -> None:
        self.inner = inner
        self.counts: Counter[str] = Counter()
        self.error: type[VmmError] = VmmError
        self.calls: list[str] = []  # names of all calls, failed ones too
        self._fails: tuple[int, ...] = ()  # indices into `calls`
        self._keeps_failing = False

    def arm(self, *ks: int, keeps_failing: bool = False, error: type[VmmError] = VmmError) -> None:
        """Fail the k-th call from now on (1 is the next) for each k, or the first one and all behind it."""
        self._fails = tuple(len(self.calls) + k - 1 for k in ks)
        self._keeps_failing, self.error = keeps_failing, error

    def heal(self) -> None:
        """Fail no more."""
        self._fails = ()

    def __getattr__(self, name: str) -> Any:  # Any: it stands in for every member of the protocol
        member = getattr(self.inner, name)
        if name not in FAILING:
            return member

        def call(*args: object, **named: object) -> object:
            at = len(self.calls)
            self.calls.append(name)
            if at in self._fails or (self._keeps_failing and self._fails and at > self._fails[0]):
                raise self.error(f"{name}: made to fail")
            result = member(*args, **named)
            self.counts[name] += 1
            return result

        return call
