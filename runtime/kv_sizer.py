"""How much KV memory there is: grown ahead of need, given back when unused, shared with other engines.

`KVWorker` owns the memory and `BlockPool` the block ids; this decides, and keeps the two in step.

Watermarks. With fewer than `low` free blocks the memory grows until there are `high`. Besides, it grows for
what requests lack now. Blocks that nobody has needed for `idle_s` go back, down to `high` free ones.

Ends of growth. The device is full, or the headroom or the target is reached: requests wait or are preempted.
After a refusal it tries again every RETRY_S.

Taking away. Blocks at the end of the memory that are in use are moved to free places first, which needs a
moment without a step in flight: see `wants_quiet`. Memory that a connector has registered is never taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import torch

from ostinato.errors import EngineError
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.memory_peers import MemoryPeers
from ostinato.runtime.memory.vmm import MemoryRegistered, VmmError
from ostinato.runtime.scheduling.block_pool import BlockPool

log = logging.getLogger(__name__)

RETRY_S = 1.0  # after a refusal; memory that others free is noticed this late
PEER_RETRY_S = 0.1  # the same where other engines have been asked
GIVE_EVERY_S = 3 * PEER_RETRY_S  # to others; until then they may not have seen what they got

Moves = Sequence[tuple[int, int]]


class KVSizer:
    """Keeps `blocks.committed == memory.usable`. Used by the engine's thread, between steps.

    The loop, per step: `grow(wanted)`; where `wants_quiet`, let the steps in flight end and `cut(move)`.
    """

    def __init__(
        self,
        memory: KVWorker,
        blocks: BlockPool,
        *,
        low: int = 0,
        high: int = 0,
        idle_s: float = 0.0,
        patience_s: float = 0.0,
        peers: MemoryPeers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`low`, `high`: free blocks. `idle_s`: 0 keeps unused blocks while the engine works.

        `patience_s`: how long after a refusal a request that fits nowhere waits for memory of others.
        """
        if not 0 <= low <= high:
            raise ValueError(f"low={low}, high={high}: must be 0 <= low <= high, in blocks")
        self._memory = memory
        self._blocks = blocks
        self._low, self._high = low, high
        self._idle_s, self._patience_s = idle_s, patience_s
        self._peers = peers
        self._clock = clock
        self._floor = blocks.committed
        self._target = blocks.capacity  # set from outside
        self._goal = 0  # of the growth that was asked last
        self._is_filling = False  # free blocks fell under `low` and are not `high` yet
        self._wanted = 0
        self._is_refused = False  # no growth has come since the last refusal
        self._retry_at = self._patient_until = self._give_at = 0.0
        self._cut_to: int | None = None
        self._cut_again_at = 0.0
        self._surplus: tuple[float, int] | None = None  # since when at least so many blocks were not needed
        self._asleep = False

    @property
    def may_grow(self) -> bool:
        """Whether a later `grow` could still add blocks."""
        if self._blocks.committed >= self._limit():
            return False
        now = self._clock()
        return now >= self._retry_at or now < self._patient_until or self._memory.is_busy

    @property
    def wants_quiet(self) -> bool:
        """Whether blocks are to be taken away: `cut` wants to be called when no plan is in flight."""
        if self._cut_to is None or self._memory.pool.registered_by:
            return False
        keep = max(self._cut_to, self._blocks.num_held)
        gain = self._blocks.committed - keep
        return gain >= self._memory.pool.grow_step or (gain > 0 and keep == self._cut_to)

    @property
    def physical_bytes(self) -> int:
        """Bytes of KV memory that are really held."""
        return self._memory.physical_bytes

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and `wake`: there are no blocks, so no step can be planned."""
        return self._asleep

    def set_target(self, target_bytes: int | None) -> None:
        """Have at most so many bytes of KV memory, but one block; None: no such end. Now and later.

        Blocks in use stay until they come free; requests wait or are preempted meanwhile.
        """
        if target_bytes is not None and target_bytes < 0:
            raise ValueError(f"target_bytes={target_bytes}: must not be negative")
        blocks = self._blocks.capacity
        if target_bytes is not None:
            blocks = max(1, min(blocks, target_bytes // self._memory.pool.block_bytes))
        self._target, self._cut_to = blocks, None
        self._retry_at = 0.0

    def grow(self, wanted: int) -> None:
        """Give blocks that have come to the requests, and ask for `wanted` more and for what is low."""
        if self._asleep:
            return
        self._wanted = wanted
        self._publish()
        now = self._clock()
        self._heed_refusal(now)
        self._decide_cut(wanted, now)
        blocks, ask = self._blocks, wanted
        if blocks.num_free < self._low or blocks.num_free >= self._high:
            self._is_filling = blocks.num_free < self._low
        if self._is_filling and not self._others_want():
            ask = max(ask, self._high - blocks.num_free)
        goal = min(blocks.committed + ask, self._limit())
        if ask <= 0 or goal <= blocks.committed or now < self._retry_at:
            self._report(wanted)
            return
        if goal > self._goal or not self._memory.is_busy:
            self._goal = goal
            self._memory.grow_to(goal)
        self._publish()
        self._heed_refusal(now)
        self._report(wanted)

    def cut(self, move: Callable[[Moves], None]) -> None:
        """Take away what `wants_quiet` is about. No plan is in flight.

        `move` copies the content of block `from` to block `to` for each pair and rewrites block tables. Where
        it finds no memory for the copy, all stays as it is until RETRY_S later.
        """
        if not self.wants_quiet or self._cut_to is None:
            return
        before, keep = self._blocks.committed, max(self._cut_to, self._blocks.num_held)
        moves = self._blocks.plan_moves(keep)
        if moves:
            try:
                move(moves)
            except torch.OutOfMemoryError as error:
                log.warning("KV memory is not given back yet, blocks cannot be moved: %s", error)
                self._cut_to, self._cut_again_at = None, self._clock() + RETRY_S
                return
            self._blocks.move(moves)
        self._blocks.shrink_tail(keep)
        if keep == self._cut_to:
            self._cut_to = None
        self._goal = 0
        self._memory.shrink_to(self._blocks.committed)
        log.info("KV memory: %d -> %d blocks, %d of them moved", before, self._blocks.committed, len(moves))

    def wait(self) -> None:
        """Return when memory that was taken away is free. For calls of an operator, not for steps."""
        self._memory.wait()

    def shrink(self) -> None:
        """The engine rests: give the unused tail back, cached prefixes too, down to what was there at start.

        What the driver fails to free is out of use all the same; the next call tries again.
        """
        before = self._blocks.committed
        if self._asleep or self._memory.pool.registered_by:
            return
        self._blocks.shrink_tail(min(self._floor, self._limit()))
        self._goal = 0
        self._memory.shrink_to(self._blocks.committed)
        if self._blocks.committed < before:
            log.info("KV memory: %d -> %d blocks after rest", before, self._blocks.committed)
        self._report(0)

    def quiet(self) -> AbstractContextManager[KVPool]:
        """Inside, memory does not change: for graph capture, which any driver call of the process spoils."""
        return self._memory.paused()

    def sleep(self) -> None:
        """Give all KV memory back and forget the prefix cache; addresses and captured graphs stay valid.

        Raises EngineError, before anything has changed, while requests hold blocks or a connector has
        registered the memory. What the driver fails to give back is logged.
        """
        if self._asleep:
            return
        if self._blocks.num_held:
            raise EngineError(
                f"sleep: running requests hold {self._blocks.num_held} KV blocks; abort them or let them end"
            )
        if self._memory.pool.registered_by:
            raise MemoryRegistered(
                f"sleep: {', '.join(self._memory.pool.registered_by)} has registered KV memory; "
                "unregister it there"
            )
        self._blocks.shrink_tail(0)
        self._cut_to, self._surplus, self._goal = None, None, 0
        self._memory.shrink_to(self._floor)
        self._memory.wait()
        self._asleep = True
        with self._memory.paused() as pool:
            try:
                pool.release_physical()
            except VmmError as error:
                log.warning("asleep, but some KV memory is not free yet: %s", error)
        self._report(0)

    def wake(self) -> None:
        """Have the blocks of the start again, empty. On VmmError (no memory) it sleeps on."""
        if not self._asleep:
            return
        with self._memory.paused() as pool:
            pool.recommit()
            try:
                pool.check()
            except VmmError:
                with suppress(VmmError):  # what resists is in the pool's books; the reason is the first error
                    pool.release_physical()
                raise
            self._asleep = False
            self._blocks.grow_to(pool.committed_blocks)
        self._retry_at = 0.0

    def check(self) -> None:
        """Raise AssertionError or VmmError when the books do not balance."""
        self._blocks.check()
        self._memory.check()
        self._publish()
        usable = 0 if self._asleep else min(self._memory.usable, max(self._limit(), self._blocks.committed))
        assert self._blocks.committed == usable, (
            f"{self._blocks.committed} block ids, {usable} blocks of memory"
        )

    def close(self) -> bool:
        """Free the memory and leave the other engines. False: tensors outside still hold some memory."""
        if self._peers is not None:
            self._peers.close()
        return self._memory.close()

    def _limit(self) -> int:
        """Blocks that there may be; while others want memory and we do, too, no more than a fair part."""
        if self._wanted > 0 and self._others_want():
            return min(self._target, max(self._floor, self._fair_blocks()))
        return self._target

    def _publish(self) -> None:
        usable = min(self._memory.usable, self._limit())
        if usable > self._blocks.committed:
            self._blocks.grow_to(usable)
            self._is_refused, self._patient_until = False, 0.0
            if not self._others_want():
                self._memory.prepare()

    def _heed_refusal(self, now: float) -> None:
        refusal = self._memory.take_refusal()
        if refusal is None:
            return
        self._goal = 0
        self._retry_at = now + (RETRY_S if self._peers is None else PEER_RETRY_S)
        if self._is_refused:
            return  # said before
        self._is_refused, self._patient_until = True, now + self._patience_s
        log.warning(
            "KV memory stays at %d blocks (%d MiB): %s. Requests wait or are preempted; "
            "free memory, or lower kv.headroom_gib",
            self._blocks.committed,
            self._blocks.committed * self._memory.pool.block_bytes >> 20,
            refusal,
        )

    def _decide_cut(self, wanted: int, now: float) -> None:
        """Set `_cut_to` if there are more blocks than there should be."""
        blocks = self._blocks
        ends = [self._limit()]
        if wanted <= 0 and self._others_want() and now >= self._give_at and self._peers is not None:
            asked = -(-self._peers.others.wanted_bytes // self._memory.pool.block_bytes)
            idle = blocks.available - self._low
            ends.append(max(self._floor, blocks.committed - max(0, min(idle, asked))))
            self._give_at = now + GIVE_EVERY_S
            self._memory.shrink_to(blocks.committed)  # spare memory first
        surplus = blocks.num_free - max(self._high, wanted)
        if not self._idle_s or surplus < self._memory.pool.grow_step:
            self._surplus = None
        elif self._surplus is None:
            self._surplus = (now, surplus)
        else:
            since, least = self._surplus
            self._surplus = (since, min(least, surplus))
            if now - since >= self._idle_s:
                ends.append(max(self._floor, blocks.committed - self._surplus[1]))
                self._surplus = None
        end = min(ends)
        if end < blocks.committed and now >= self._cut_again_at:
            self._cut_to = end if self._cut_to is None else min(end, self._cut_to)
        elif self._cut_to is not None and wanted > 0:
            self._cut_to = None  # it is needed again

    def _others_want(self) -> bool:
        return self._peers is not None and self._peers.others.wanted_bytes > 0

    def _fair_blocks(self) -> int:
        if self._peers is None:
            return self._blocks.capacity
        others = self._peers.others
        held = self._blocks.committed * self._memory.pool.block_bytes + others.held_bytes
        return held // (others.engines + 1) // self._memory.pool.block_bytes

    def _report(self, wanted: int) -> None:
        if self._peers is not None:
            lacks = max(0, wanted) if self._is_refused else 0
            self._peers.report(self.physical_bytes, lacks * self._memory.pool.block_bytes)
