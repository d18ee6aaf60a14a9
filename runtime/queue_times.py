"""How long each request waited for the first step with it."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.runtime.scheduling.plan import Plan


class QueueTimes:
    """Call `arrived`, `planned` with every plan, and `take` once per request, however it ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals: dict[str, float] = {}  # of those that are in no plan yet
        self._waited: dict[str, float] = {}

    def arrived(self, name: str) -> None:
        """A request is in the queue now."""
        self._arrivals[name] = self._clock()

    def planned(self, plan: Plan) -> None:
        """A step with these requests begins now."""
        if not self._arrivals:
            return
        for entry in plan.entries:
            if (arrival := self._arrivals.pop(entry.request_id, None)) is not None:
                self._waited[entry.request_id] = self._clock() - arrival

    def take(self, name: str) -> float:
        """Seconds that it waited, once; 0.0 when it was never in a plan, or is not known."""
        self._arrivals.pop(name, None)
        return self._waited.pop(name, 0.0)
