"""Sleep and waking of an engine: all memory that can be had again goes back, and comes back as it was.

    awake --Sleep(1)--> weights in host memory, no KV --Wake--> weights verified, KV empty
    awake --Sleep(2)--> weights in the artifact, no KV --Wake--> weights read and verified, KV empty

Addresses stay, so captured graphs stay valid. No step can run while asleep. Requests that run are preempted:
they wait, with those that arrive meanwhile, and their tokens so far are computed again after waking. The
prefix cache is empty then.

Sleep changes nothing when it is refused; waking that fails leaves the engine asleep, to be tried again.
"""

from __future__ import annotations

import logging

from ostinato.errors import EngineError, SleepRefused, WakeFailed
from ostinato.runtime.kv_sizer import KVSizer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import VmmError
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.sleeping_weights import Weights

log = logging.getLogger(__name__)


def check_deeper(level: int, asleep: int) -> None:
    """Raise SleepRefused for less than the level `asleep` of an engine."""
    if level < asleep:
        raise SleepRefused(
            f"the engine sleeps at level {asleep} already and has no copy of its weights; wake it first to "
            f"let it sleep at level {level}"
        )


def wake_weights(weights: Weights) -> None:
    """Have them again. Raises WakeFailed: they sleep on."""
    try:
        weights.wake()
    except Exception as error:  # a border: whatever it is, the engine goes on sleeping and can be asked again
        reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        raise WakeFailed(f"weights: {reason}; the engine sleeps on") from error


class Sleeper:
    """What of an engine can sleep. Called between steps; `sleep` with no step in flight."""

    def __init__(self, weights: Weights, pool: KVPool, sizer: KVSizer, scheduler: Scheduler) -> None:
        self._weights, self._pool, self._sizer, self._scheduler = weights, pool, sizer, scheduler
        self.level = 0  # 0: awake

    @property
    def weights_bytes(self) -> int:
        """Bytes of the device that the weights take now."""
        return self._weights.resident_bytes

    def check(self, level: int) -> None:
        """Raise SleepRefused if `sleep(level)` will be, whatever the requests do."""
        check_deeper(level, self.level)
        if self._pool.registered_by:
            raise SleepRefused(
                f"{', '.join(self._pool.registered_by)} has registered KV memory, which must not go away; "
                "unregister it there"
            )

    def sleep(self, level: int) -> None:
        """Level 1 or 2. Raises SleepRefused: then all is as before, but requests that ran are preempted."""
        self.check(level)
        try:
            if not self.level:
                self._scheduler.preempt_all()
            if level > self.level:
                self._weights.sleep(level)
            self._sizer.sleep()
        except EngineError as error:
            raise SleepRefused(str(error)) from error
        self.level = level
        log.info(
            "asleep at level %d: %d MiB of weights and %d MiB of KV memory are still held",
            level,
            self._weights.resident_bytes >> 20,
            self._sizer.physical_bytes >> 20,
        )

    def wake(self) -> None:
        """Have everything again; nothing to do when awake. Raises WakeFailed: it sleeps on."""
        if not self.level:
            return
        try:
            self._sizer.wake()
        except VmmError as error:
            raise WakeFailed(f"no KV memory: {error}; the engine sleeps on, try again") from error
        try:
            wake_weights(self._weights)
        except WakeFailed:
            self._sizer.sleep()
            raise
        self.level = 0
        log.info("awake")
