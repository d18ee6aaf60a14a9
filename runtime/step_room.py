"""Steps that find no memory on the device are planned again, smaller.

A replayed graph needs no memory, so small steps run where they are captured. What does not is a long prompt
in one piece while another program takes the memory that `kv.headroom_gib` keeps free. A request is lost only
if not even one token of it finds memory: where nothing is captured, or its prompt is scored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ostinato.runtime.scheduling.plan import Plan
from ostinato.runtime.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

SMALL_S = 10.0  # until steps of the full size are tried again


class NoRoomError(Exception):
    """The device has no memory for a step, of which nothing has been computed that matters."""


class StepRoom:
    """Sets `step_tokens` of a scheduler."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._until: float | None = None

    def take_back(self, plan: Plan, error: NoRoomError) -> bool:
        """Let the newest plan be made again with half its tokens. False: it had only one.

        Its request cannot run then; the others, which may be replayed, need no small steps for it.
        """
        if plan.num_tokens == 1:
            self._allow_full()
            return False
        self._scheduler.take_back(plan)
        self._scheduler.step_tokens = plan.num_tokens // 2
        self._until = self._clock() + SMALL_S
        log.warning(
            "a step of %d tokens found no memory (%s); steps have at most %d for %g s. Free memory on the "
            "device, raise kv.headroom_gib, or lower kv.max_gib or scheduler.max_step_tokens",
            plan.num_tokens,
            error,
            self._scheduler.step_tokens,
            SMALL_S,
        )
        return True

    def recover(self) -> None:
        """Allow steps of the full size again when it is time."""
        if self._until is not None and self._clock() >= self._until:
            self._allow_full()

    def _allow_full(self) -> None:
        self._until = None
        self._scheduler.step_tokens = self._scheduler.config.max_step_tokens
