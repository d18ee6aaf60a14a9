"""`ElasticBuffer`: memory at a fixed address that grows and shrinks without moving.

One reservation holds S equal segments, one behind the other; all have the same number of committed bytes,
counted from their start (K and V planes of a layer: S = 2; a single plane: S = 1). Memory comes in granules
of the driver. A segment need not end where a granule ends: a granule that straddles the border belongs to the
segment that starts in it, and is mapped once, as soon as anything is committed.

    capacity 10, committed 4     |AAAA......|BBBB......|
    granules of 4                [0 ][1 ][2 ][3 ][4 ]        mapped: 0 for A; 2 (straddles) and 3 for B

Shrinking gives back whole extents (handles) only; what stays mapped behind the committed bytes serves the
next growth.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial

import torch

from ostinato.runtime.memory.mapped_range import MappedRange
from ostinato.runtime.memory.vmm import VmmDriver, VmmError

log = logging.getLogger(__name__)

DEFAULT_EXTENT_BYTES = 32 << 20
"""Bytes of the largest handle, and so the coarsest step of shrinking."""


class _Owner:
    """Held by the buffer and by every tensor over it: when the last of them is gone, the memory is freed."""


class ElasticBuffer:
    """S segments that grow in lockstep under one fixed base address.

    Not thread-safe: one thread at a time calls the methods. Tensors may be used from any thread, as far as
    they stay inside the committed bytes; touching more is a fault that ends the process (on a GPU: an error
    of the device). Tensors keep the memory alive: after `close` it is freed when the last of them is gone.
    """

    def __init__(
        self,
        driver: VmmDriver,
        segments: int,
        segment_capacity_bytes: int,
        *,
        extent_bytes: int = DEFAULT_EXTENT_BYTES,
    ) -> None:
        granule = driver.granularity
        if segments < 1:
            raise ValueError(f"segments={segments}: must be at least 1")
        if segment_capacity_bytes < 1:
            raise ValueError(f"segment_capacity_bytes={segment_capacity_bytes}: must be at least 1")
        if extent_bytes < granule or extent_bytes % granule:
            raise ValueError(
                f"extent_bytes={extent_bytes}: must be a multiple of the granule, {granule} bytes"
            )
        self.driver = driver
        self.segments = segments
        self.capacity_bytes = segment_capacity_bytes
        self.extent_bytes = extent_bytes
        self._granule = granule
        self._extent_granules = extent_bytes // granule
        end = -(-segments * segment_capacity_bytes // granule)
        starts = [s * segment_capacity_bytes // granule for s in range(segments)]
        self._owned = [
            b - a for a, b in zip(starts, [*starts[1:], end], strict=True)
        ]  # granules of each segment
        self._range = MappedRange(driver, end * granule, starts)
        self._committed = 0
        self._used = 0  # bytes of each segment that may have been written since they were mapped
        self._is_released = False
        self._owner: _Owner | None = _Owner()
        freeing = weakref.finalize(self._owner, self._range.free)
        freeing.atexit = False  # the end of the process frees all, and other threads may still compute

    @property
    def base(self) -> int:
        """First address; never changes."""
        return self._range.base

    @property
    def committed_bytes(self) -> int:
        """Bytes of each segment that may be touched (not while `is_released`)."""
        return self._committed

    @property
    def physical_bytes(self) -> int:
        """Bytes of all handles held; of the whole reservation if the driver is not elastic."""
        return self._range.physical_bytes if self.driver.is_elastic else self._range.size

    @property
    def num_extents(self) -> int:
        """Handles that are mapped."""
        return sum(map(len, self._range.runs))

    @property
    def is_released(self) -> bool:
        """True between `release_physical` and `recommit`: addresses stay, memory is gone."""
        return self._is_released

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._owner is None

    def bytes_to_grow(self, segment_bytes: int) -> int:
        """Bytes that committing `segment_bytes` would take from the driver."""
        lengths = self._lengths(segment_bytes)
        return sum(max(0, n - self._range.granules(s)) for s, n in enumerate(lengths)) * self._granule

    def grow(self, segment_bytes: int, *, zero_new: bool = False) -> None:
        """Commit the first `segment_bytes` of every segment; bytes so far and all addresses stay.

        New bytes are zero with `zero_new`, else of any value. All or nothing: a driver's error
        (`VmmOutOfMemory`, `VmmError`) is raised after what was done is undone. Cost on the host: see
        `HostVmm.create`.
        """
        self._check_usable("grow")
        if segment_bytes < self._committed:
            raise ValueError(
                f"grow({segment_bytes}): {self._committed} bytes are committed already; shrink makes it less"
            )
        if segment_bytes > self.capacity_bytes:
            raise ValueError(
                f"grow({segment_bytes}): only {self.capacity_bytes} bytes are reserved; reserve more"
            )
        before = self._range.extend(self._lengths(segment_bytes), self._extent_granules)
        if zero_new:
            self._zero_or_undo(self._committed, segment_bytes, before, partial(self._back_to, before))
        self._committed = segment_bytes
        self._used = max(self._used, segment_bytes)

    def shrink(self, segment_bytes: int) -> None:
        """Keep the first `segment_bytes` of every segment; whole extents behind them go back to the driver.

        If the driver refuses to unmap, all is put back as it was and its error raised (were it to refuse that
        too, `committed_bytes` tells what is left). If it refuses to release, the shrink is done and the error
        raised; that memory counts in `physical_bytes` and is tried again by every later call.
        """
        self._check_usable("shrink")
        if not 0 <= segment_bytes <= self._committed:
            raise ValueError(
                f"shrink({segment_bytes}): must be 0 to {self._committed} (committed); grow makes it more"
            )
        self._cut(segment_bytes)
        self._committed = segment_bytes
        self._range.settle()

    def release_physical(self) -> None:
        """Give all memory back; addresses, tensors and `committed_bytes` stay.

        Fails like `shrink`; called again it only tries to give back what resisted.
        """
        self._check_open("release_physical")
        if not self._is_released:
            self._cut(0)
        self._is_released = True
        self._range.settle()

    def recommit(self) -> None:
        """Undo `release_physical`: the committed bytes are there again and read zero. All or nothing."""
        self._check_open("recommit")
        if not self._is_released:
            raise ValueError("recommit: nothing was released; call release_physical first")
        self._fill(self._extent_granules)

    def defragment(self) -> None:
        """Back the committed bytes of each segment by one handle. Content is lost and reads zero.

        On an error memory is as after `release_physical`; `recommit` may still succeed, with smaller handles.
        """
        self.release_physical()
        self._fill(max(self._owned))

    def segment(self, index: int) -> torch.Tensor:
        """A segment over its whole capacity, uint8 [capacity_bytes]; touch only the committed bytes."""
        return self._window("segment", index, self.capacity_bytes)

    def narrowed(self, index: int) -> torch.Tensor:
        """The committed bytes of a segment, uint8 [committed_bytes]; the tensor's storage ends with them."""
        self._check_usable("narrowed")
        return self._window("narrowed", index, self._committed)

    def prefix(self) -> torch.Tensor:
        """`narrowed(0)` of a buffer that has no other segment."""
        if self.segments != 1:
            raise ValueError(
                f"prefix: committed bytes of {self.segments} segments are apart; use narrowed(index)"
            )
        return self.narrowed(0)

    def check(self) -> None:
        """Raise `VmmError` if the books contradict themselves or the driver's."""
        if self.is_closed:
            return
        self._range.check()
        lengths = self._lengths(0 if self._is_released else self._committed)
        for s, (needed, owned) in enumerate(zip(lengths, self._owned, strict=True)):
            if not needed <= self._range.granules(s) <= owned:
                raise VmmError(
                    f"segment {s}: {self._range.granules(s)} granules mapped, needed {needed}, owned {owned}"
                )

    def close(self) -> bool:
        """Let go of the memory; repeated calls do no harm. False: it goes with the last tensor over it."""
        self._owner = None
        return self._range.is_freed

    def _lengths(self, segment_bytes: int) -> list[int]:
        """Granules that each segment must have mapped, of those that it owns."""
        if not segment_bytes:
            return [0] * self.segments
        ends = (-(-(s * self.capacity_bytes + segment_bytes) // self._granule) for s in range(self.segments))
        return [
            min(n, end - start) for n, end, start in zip(self._owned, ends, self._range.starts, strict=True)
        ]

    def _cut(self, segment_bytes: int) -> None:
        try:
            self._range.cut(self._lengths(segment_bytes))
        except VmmError:
            while self.bytes_to_grow(self._committed):  # not all could be put back: keep what is really there
                self._committed = max(segment_bytes, self._committed - self._granule)
            raise

    def _back_to(self, lengths: list[int]) -> None:
        self._range.cut(lengths)
        self._range.settle()

    def _fill(self, extent_granules: int) -> None:
        before = self._range.extend(self._lengths(self._committed), extent_granules)
        self._is_released = False
        self._used = self._committed
        self._zero_or_undo(0, self._committed, before, self.release_physical)

    def _zero_or_undo(self, begin: int, end: int, before: list[int], undo: Callable[[], None]) -> None:
        """`_zero`; if the driver fails, what was mapped for it goes back first."""
        try:
            self._zero(begin, end, before)
        except VmmError:
            try:
                undo()
            except VmmError as error:
                log.warning("memory that could not be zeroed is not given back yet: %s", error)
            raise

    def _zero(self, begin: int, end: int, before: list[int]) -> None:
        """Zero these bytes of every segment, except those that the driver zeroed and nobody used."""
        fresh: list[tuple[int, int]] = []  # granules added since `before`, as bytes from, to
        if self.driver.creates_zeroed:
            end = min(end, self._used)
            fresh = [
                ((start + old) * self._granule, (start + self._range.granules(s)) * self._granule)
                for s, (start, old) in enumerate(zip(self._range.starts, before, strict=True))
            ]
        spans: list[tuple[int, int]] = []  # address, bytes
        for s in range(self.segments):
            at, stop = s * self.capacity_bytes + begin, s * self.capacity_bytes + end
            for zeroed_from, zeroed_to in [*fresh, (stop, stop)]:
                until = min(zeroed_from, stop)
                if at < until:
                    spans.append((self.base + at, until - at))
                at = max(at, zeroed_to)
        if spans:
            self.driver.zero(spans)

    def _window(self, what: str, index: int, size: int) -> torch.Tensor:
        self._check_open(what)
        if not 0 <= index < self.segments:
            raise ValueError(f"{what}({index}): the buffer has segments 0 to {self.segments - 1}")
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self.driver.device)
        return self.driver.tensor(self.base + index * self.capacity_bytes, size, self._owner)

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise ValueError(f"{what}: the buffer is closed; make a new one")

    def _check_usable(self, what: str) -> None:
        self._check_open(what)
        if self._is_released:
            raise ValueError(f"{what}: physical memory is released; call recommit first")
