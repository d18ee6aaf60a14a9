"""`KVWorker`: who changes the size of a `KVPool`, beside the engine's steps or between them.

The engine's thread says how many blocks there should be and reads how many it may use; it never waits. With a
thread of its own the worker maps memory while steps run. Without one (`is_threaded=False`: where mapping and
zeroing need the processor that computes) a call does one step of growth before it returns.

    engine    grow_to(300) ----------> usable 100 ... 200 ... 300     publishes them between two steps
    worker        create, map, zero ...

Taking away goes the other way round: the engine first forgets the blocks, then calls `shrink_to`; from that
moment they are not `usable`, and the worker waits for the steps in flight before it unmaps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from ostinato.errors import EngineError
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.memory_limits import Limits
from ostinato.runtime.memory.vmm import VmmError

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    verb: Literal["grow", "shrink"]
    blocks: int


class KVWorker:
    """Owns a pool: nobody else calls its verbs. All methods are for one thread (the engine's)."""

    def __init__(
        self,
        pool: KVPool,
        *,
        is_threaded: bool = False,
        spare: HandlePool | None = None,
        limits: Limits | None = None,
    ) -> None:
        """With `spare` (the pool's driver) the memory of the next step is made while there is time."""
        self.pool = pool
        self._spare = spare
        self._limits = limits
        self._is_threaded = is_threaded
        self._using = threading.Lock()  # of the pool: held while its size changes
        self._news = threading.Condition()  # guards the names below
        self._job: _Job | None = None  # the newest wish; an older one is forgotten
        self._doing: _Job | None = None
        self._committed, self._physical = pool.committed_blocks, pool.physical_bytes
        self._refusal: str | None = None
        self._owes_memory = False  # the driver failed to free what is behind the last block
        self._wants_spare = False
        self._crash: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if is_threaded:
            self._thread = threading.Thread(target=self._work, name="ostinato-kv", daemon=True)
            self._thread.start()

    @property
    def usable(self) -> int:
        """Blocks 0 to this number, exclusive, have memory and will not lose it by what was asked so far."""
        with self._news:
            self._raise_crash()
            ends = [
                job.blocks for job in (self._job, self._doing) if job is not None and job.verb == "shrink"
            ]
            return min([self._committed, *ends])

    @property
    def is_busy(self) -> bool:
        """Whether something that was asked is not done yet."""
        with self._news:
            return self._job is not None or self._doing is not None

    @property
    def physical_bytes(self) -> int:
        """Bytes that are really held, memory made for the next growth included."""
        with self._news:
            held = self._physical  # not the pool's own count, which changes while it is added up
        return held + (self._spare.spare_bytes if self._spare is not None else 0)

    def take_refusal(self) -> str | None:
        """Why a growth since the last call ended below its goal; None if none did."""
        with self._news:
            refusal, self._refusal = self._refusal, None
            return refusal

    def grow_to(self, blocks: int) -> None:
        """There should be so many blocks; fewer come if memory ends (`take_refusal`)."""
        self._ask(_Job("grow", blocks))

    def shrink_to(self, blocks: int) -> None:
        """Give back the memory behind so many blocks, which nobody uses from now on, and all spare memory.

        What the driver refuses is logged, counts in `physical_bytes`, and is tried again by the next call.
        """
        with self._news:
            is_done = blocks >= self._committed and not (self._job or self._doing or self._owes_memory)
        if not is_done or self._spare is not None:  # some may be in the making
            self._ask(_Job("shrink", blocks))

    def prepare(self) -> None:
        """Make the memory of the next step of growth when nothing else is to do."""
        with self._news:
            self._wants_spare = self._spare is not None
            self._news.notify_all()
        if not self._is_threaded:
            self._prepare()

    @contextmanager
    def paused(self) -> Iterator[KVPool]:
        """Nothing changes inside: for graph capture, sleep, checks. Waits for what is being done."""
        with self._using:
            try:
                yield self.pool
            finally:
                with self._news:
                    self._note_size()

    def wait(self) -> None:
        """Return when all that was asked is done. For start and end, not for steps."""
        with self._news:
            self._news.wait_for(lambda: self._crash is not None or not (self._job or self._doing))
            self._raise_crash()

    def check(self) -> None:
        """Raise VmmError if the books of the pool are wrong."""
        with self.paused() as pool:
            pool.check()

    def close(self) -> bool:
        """Stop and let go of the pool's memory. False: tensors outside still hold some of it."""
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._spare is not None:
            try:
                self._spare.trim()
            except VmmError as error:
                log.warning("spare KV memory could not be given back: %s", error)
        return self.pool.close()

    def _ask(self, job: _Job) -> None:
        with self._news:
            self._raise_crash()
            self._job = job
            self._news.notify_all()
        if not self._is_threaded:
            self._turn()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closing or self._job or self._wants_spare)
                if self._is_closing:
                    return
                has_job = self._job is not None
            try:
                if has_job:
                    self._turn()
                else:
                    self._prepare()
            except BaseException as crash:  # a thread border: the engine's next call raises it
                with self._news:
                    self._crash = crash
                    self._news.notify_all()
                return

    def _turn(self) -> None:
        """One step of the newest job."""
        with self._using:
            with self._news:
                job, self._job = self._job, None
                if job is None:
                    return
                self._doing = job
            refusal, is_done = None, True
            try:
                if job.verb == "shrink":
                    self._shrink(job.blocks)
                else:
                    goal = min(job.blocks, self.pool.committed_blocks + self.pool.grow_step)
                    if self.pool.commit(goal) < goal:
                        refusal = self.pool.stopped_by
                    is_done = refusal is not None or self.pool.committed_blocks >= job.blocks
            except VmmError as error:  # the driver failed; all layers still have what they had
                refusal = str(error)
            with self._news:
                self._note_size()
                self._refusal = refusal or self._refusal
                self._doing = None
                if self._job is None and not is_done and self._is_threaded:
                    self._job = job  # the next step of it
                self._news.notify_all()

    def _note_size(self) -> None:
        self._committed, self._physical = self.pool.committed_blocks, self.pool.physical_bytes

    def _shrink(self, blocks: int) -> None:
        with self._news:
            self._wants_spare = False
        owes, self._owes_memory = self._owes_memory, True
        try:
            if owes or blocks < self.pool.committed_blocks:
                self.pool.shrink(blocks)
            if self._spare is not None:
                self._spare.trim()
            self._owes_memory = False
        except VmmError as error:
            log.warning("KV memory of unused blocks is not free yet, the next rest tries again: %s", error)

    def _prepare(self) -> None:
        with self._news:
            wants, self._wants_spare = self._wants_spare, False
        if not wants or self._spare is None:
            return
        with self._using:
            handles = self.pool.handles_of_step()
            need = self._spare.missing_bytes(handles)
            taken = self._spare.spare_bytes  # `limits` count spare memory as free
            if self._limits is None or need + taken <= self._limits.available():
                try:
                    self._spare.prepare(handles)
                except VmmError as error:
                    log.warning("KV memory could not be made ahead of need: %s", error)

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise EngineError(f"the KV memory thread has ended: {self._crash!r}") from self._crash
