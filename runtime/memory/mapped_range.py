"""`MappedRange`: one reservation and the physical memory mapped under it, in runs of neighbouring extents.

An extent is one handle, mapped once, one or more granules. A run starts at a fixed granule and grows and
shrinks at its end. This file is where driver calls are made and undone; what the runs mean is
`ElasticBuffer`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ostinato.runtime.memory.vmm import VmmDriver, VmmError

log = logging.getLogger(__name__)


class Extent(NamedTuple):
    """One handle. In granules, counted from the start of the reservation."""

    first: int
    size: int
    handle: int


class MappedRange:
    """A reservation with runs that start at granules `starts`; the caller keeps runs from overlapping."""

    def __init__(self, driver: VmmDriver, size: int, starts: Sequence[int]) -> None:
        self.driver = driver
        self.granule = driver.granularity
        self.size = size
        self.starts = tuple(starts)
        self.runs: list[list[Extent]] = [[] for _ in starts]
        self.is_freed = False
        self._stray: list[tuple[Extent, bool]] = []  # (extent, is mapped): what a failed call could not undo
        self.base = driver.reserve(size)

    def granules(self, run: int) -> int:
        """Granules mapped in a run."""
        extents = self.runs[run]
        return extents[-1].first + extents[-1].size - self.starts[run] if extents else 0

    @property
    def physical_bytes(self) -> int:
        """Bytes of all handles held, stray ones too."""
        held = sum(map(self.granules, range(len(self.runs))))
        return (held + sum(extent.size for extent, _ in self._stray)) * self.granule

    def extend(self, lengths: Sequence[int], extent_granules: int) -> list[int]:
        """Make each run at least so many granules long; return the lengths before. All or nothing."""
        self.settle()
        before = [self.granules(run) for run in range(len(self.runs))]
        depths = [len(extents) for extents in self.runs]
        try:
            for run, (start, length) in enumerate(zip(self.starts, lengths, strict=True)):
                at, end = start + before[run], start + length
                while at < end:
                    count = min(extent_granules, end - at)
                    self.runs[run].append(self._create(at, count))
                    at += count
        except VmmError:
            for extents, depth in zip(self.runs, depths, strict=True):
                while len(extents) > depth:
                    self._stray.append((extents.pop(), True))
            self._give_back_stray()
            raise
        return before

    def cut(self, lengths: Sequence[int]) -> None:
        """Unmap extents that begin at or behind these lengths; `settle`, to be called next, releases them.

        If an unmap fails, the extents unmapped so far are mapped again with their bytes, and the error is
        raised. Where even that fails the run stays shorter: look at `granules` afterwards.
        """
        self._give_back_stray()
        self.driver.quiesce()
        gone: list[tuple[int, Extent]] = []
        try:
            for run, (start, length) in enumerate(zip(self.starts, lengths, strict=True)):
                extents = self.runs[run]
                while extents and extents[-1].first >= start + length:
                    self.driver.unmap(*self._place(extents[-1]))
                    gone.append((run, extents.pop()))
        except VmmError:
            self._restore(gone)
            raise
        self._stray += [(extent, False) for _, extent in gone]

    def settle(self) -> None:
        """Release what `cut` unmapped, undo what failures left; what resists is kept for the next time."""
        failure = self._give_back_stray()
        if failure is not None:
            raise failure

    def free(self) -> None:
        """Give everything back. Never raises, as it runs when the last tensor is collected: see the log."""
        self.is_freed = True
        try:
            self.driver.quiesce()
            self._stray += [(extent, True) for extents in self.runs for extent in extents]
            self.runs = [[] for _ in self.runs]
            self.settle()
            self.driver.free_reserved(self.base, self.size)
        except VmmError as error:
            log.warning("%d bytes at %#x could not be given back: %s", self.physical_bytes, self.base, error)

    def check(self) -> None:
        """Raise `VmmError` if a run has a gap or the driver has other books."""
        mapped = sum(extent.size for extent, is_mapped in self._stray if is_mapped)
        for run, extents in enumerate(self.runs):
            at = self.starts[run]
            for extent in extents:
                if extent.first != at or extent.size < 1:
                    raise VmmError(f"run {run}: {extent} does not continue at granule {at}")
                at += extent.size
            mapped += at - self.starts[run]
        by_driver = self.driver.mapped_bytes(self.base, self.size)
        if by_driver != mapped * self.granule:
            raise VmmError(
                f"{mapped * self.granule} bytes are mapped by our books, {by_driver} by the driver's"
            )

    def _place(self, extent: Extent) -> tuple[int, int]:
        return self.base + extent.first * self.granule, extent.size * self.granule

    def _create(self, first: int, count: int) -> Extent:
        address, size = self.base + first * self.granule, count * self.granule
        extent = Extent(first, count, self.driver.create(size, at=address))
        self._map(extent)
        return extent

    def _map(self, extent: Extent) -> None:
        address, size = self._place(extent)
        is_mapped = False
        try:
            self.driver.map(address, size, extent.handle)
            is_mapped = True
            self.driver.set_access(address, size)
        except VmmError:
            self._stray.append((extent, is_mapped))
            self._give_back_stray()
            raise

    def _restore(self, gone: list[tuple[int, Extent]]) -> None:
        broken = set()  # a run cannot continue behind an extent that is lost
        while gone:
            run, extent = gone.pop()
            if run in broken:
                self._stray.append((extent, False))
                continue
            try:
                self._map(extent)
                self.runs[run].append(extent)
            except VmmError as error:
                broken.add(run)
                log.warning("an extent of %d granules could not be mapped again: %s", extent.size, error)
        self._give_back_stray()

    def _give_back_stray(self) -> VmmError | None:
        failure = None
        still: list[tuple[Extent, bool]] = []
        for extent, is_mapped in self._stray:
            try:
                if is_mapped:
                    self.driver.unmap(*self._place(extent))
                    is_mapped = False
                self.driver.release(extent.handle)
            except VmmError as error:
                failure = error
                still.append((extent, is_mapped))
        self._stray = still
        return failure
