"""How much KV memory there is: grown ahead of need between steps, given back when the engine rests.

`KVPool` owns the memory and `BlockPool` the block ids; this keeps the two in step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import VmmError
from ostinato.runtime.scheduling.block_pool import BlockPool

log = logging.getLogger(__name__)

RETRY_S = 1.0  # after a refusal; memory that others free is noticed this late


class KVSizer:
    """Keeps `blocks.committed == memory.committed_blocks`. Used by the engine's thread, between steps."""

    def __init__(
        self, memory: KVPool, blocks: BlockPool, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._blocks = blocks
        self._clock = clock
        self._floor = blocks.committed
        self._retry_at = 0.0
        self._owes_memory = False  # a driver failed to free what is behind the last block

    @property
    def may_grow(self) -> bool:
        """Whether a later `grow` could still add blocks."""
        return self._blocks.committed < self._blocks.capacity and self._clock() >= self._retry_at

    def grow(self, wanted: int) -> None:
        """Add up to `wanted` blocks, at most one `grow_step` of the memory.

        A refusal, for lack of memory or because the driver failed, is logged and holds for RETRY_S.
        """
        if wanted <= 0 or not self.may_grow:
            return
        goal = min(self._blocks.committed + min(wanted, self._memory.grow_step), self._blocks.capacity)
        try:
            got, refusal = self._memory.commit(goal), self._memory.stopped_by
        except VmmError as error:  # the driver failed; all layers still have what they had
            got, refusal = self._memory.committed_blocks, str(error)
        self._blocks.grow_to(got)
        if got < goal:
            self._retry_at = self._clock() + RETRY_S
            log.warning(
                "KV memory stays at %d blocks (%d MiB): %s. Requests wait or are preempted; "
                "free memory, or lower kv.headroom_gib",
                got,
                got * self._memory.block_bytes >> 20,
                refusal,
            )

    def shrink(self) -> None:
        """Give the unused tail back, down to what was there at start.

        Blocks that the driver fails to free are out of use all the same; the next call tries again.
        """
        before = self._blocks.committed
        if self._blocks.shrink_tail(self._floor) == 0 and not self._owes_memory:
            return
        try:
            self._memory.shrink(self._blocks.committed)
        except VmmError as error:
            self._owes_memory = True
            log.warning("KV memory of unused blocks is not free yet, the next rest tries again: %s", error)
            return
        self._owes_memory = False
        log.info("KV memory: %d -> %d blocks after rest", before, self._blocks.committed)

    def check(self) -> None:
        """Raise AssertionError or VmmError when the books do not balance."""
        self._blocks.check()
        self._memory.check()
        assert self._blocks.committed == self._memory.committed_blocks, (
            f"{self._blocks.committed} block ids, {self._memory.committed_blocks} blocks of memory"
        )
