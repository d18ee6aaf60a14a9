"""How much memory of a GPU is really free, by the count of its driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.runtime.memory.memory_limits import MemoryState


@dataclass(frozen=True)
class DeviceLimits:
    """`Limits` of a GPU: `memory` gives its free and total bytes, all processes counted.

    What torch's allocator has cached counts as taken: only torch itself can use it.
    """

    memory: Callable[[], tuple[int, int]]
    headroom_bytes: int = 0

    def __post_init__(self) -> None:
        if self.headroom_bytes < 0:
            raise ValueError(f"headroom_bytes={self.headroom_bytes}: must not be negative")

    def read(self) -> MemoryState:
        """One call of the driver, about 10 us."""
        free, total = self.memory()
        return MemoryState(total, free, "the GPU's driver")

    def available(self) -> int:
        """Bytes that may be taken now: what is free, less the headroom; never negative."""
        return max(0, self.read().free_bytes - self.headroom_bytes)
