"""The asyncio half of inputs on their way: who waits for the result of which."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ostinato.errors import EngineError, RequestAborted
from ostinato.runtime.messages import PoolResult
from ostinato.runtime.request_check import name_in_use


class PoolAnswers:
    """Lives in one loop. A result that nobody waits for any more is dropped."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[PoolResult]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    @contextmanager
    def waiting(self, names: Sequence[str]) -> Iterator[list[asyncio.Future[PoolResult]]]:
        """One future for each name, while the block runs. InvalidRequest for a name that is in use."""
        loop = asyncio.get_running_loop()
        futures: dict[str, asyncio.Future[PoolResult]] = {}
        for name in names:
            if name in self._open or name in futures:
                raise name_in_use(name)
            futures[name] = loop.create_future()
        self._open |= futures
        try:
            yield list(futures.values())
        finally:
            for name, future in futures.items():
                self._open.pop(name, None)
                future.cancel()

    def settle(self, results: Sequence[PoolResult]) -> None:
        """Results of a step have come; those with an error are raised where they are awaited."""
        for result in results:
            if result.error:
                kind = RequestAborted if result.aborted else EngineError
                self.refuse(result.request_id, kind(result.error))
            elif (future := self._open.pop(result.request_id, None)) is not None and not future.done():
                future.set_result(result)

    def refuse(self, name: str, error: EngineError) -> bool:
        """Raise `error` where the result is awaited; False: it is not."""
        future = self._open.pop(name, None)
        if future is None:
            return False
        if not future.done():
            future.set_exception(error)
        return True

    def refuse_all(self, error: EngineError) -> None:
        """The engine has ended."""
        for name in list(self._open):
            self.refuse(name, type(error)(str(error)))
