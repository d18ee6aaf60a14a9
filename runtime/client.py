"""What a front end sees of an engine, whether it runs in this process or in another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ostinato.runtime.messages import (
    EngineInfo,
    EngineState,
    EngineStats,
    GenerateRequest,
    PoolRequest,
    PoolResult,
    TokenEvent,
)


class EngineClient(Protocol):
    """One engine. All methods are called from one asyncio loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model; valid after `start`."""

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine last made progress while it had work; 0.0 when idle. Raises EngineDead."""

    async def start(self) -> None:
        """Return when the engine can serve; raise what went wrong otherwise."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Events of one request, the last with a `finish_reason`. Closing the iterator early aborts the
        request.

        Raises Overloaded when the queue is full, ContextTooLong, InvalidRequest, EngineDead.
        """

    async def pool(self, requests: Sequence[PoolRequest]) -> list[PoolResult]:
        """Numbers of all these inputs, in their order. One failure, or leaving early, ends all of them.

        Raises Overloaded, ContextTooLong, InvalidRequest, WrongTask, RequestAborted, EngineDead, EngineError.
        """

    async def abort(self, request_ids: list[str]) -> None:
        """Cancel; unknown ids are ignored."""

    async def set_kv_target(self, target_bytes: int | None) -> EngineState:
        """Have at most so many bytes of KV memory, as soon as requests let go; None: what the settings allow.

        Raises InvalidRequest, EngineDead.
        """

    async def sleep(self, level: int) -> EngineState:
        """Give memory back until `wake`: see runtime/sleep.py.

        Raises InvalidRequest, SleepRefused, EngineDead.
        """

    async def wake(self) -> EngineState:
        """Undo `sleep`. Raises WakeFailed (it sleeps on), EngineDead."""

    async def reset_prefix_cache(self) -> int:
        """Let no later request find what was computed so far; returns how many blocks could be found.

        Raises EngineDead.
        """

    async def end_requests(self, request_ids: Sequence[str] | None) -> int:
        """As `abort`, of all for None; returns how many were ended, when their blocks are back.

        Raises EngineDead.
        """

    async def start_profile(self, seconds: float | None) -> float:
        """Record what the engine's process does; returns the seconds after which the profile ends by itself.

        None: `profile.max_seconds`.  Raises InvalidRequest, ProfileRefused, EngineDead.
        """

    async def stop_profile(self) -> str:
        """End the profile; returns the file. Raises ProfileRefused, EngineDead."""

    async def close(self) -> None:
        """Abort what still runs, stop the engine, free its memory. Safe to call twice."""
