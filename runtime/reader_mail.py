"""What has come from the engine for one reader, taken all at once.

A reader that is slower than the engine is woken once for many tokens, not once for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ostinato.errors import EngineError
from ostinato.runtime.messages import TokenEvent

News = TokenEvent | EngineError


class ReaderMail:
    """An unbounded mailbox of one asyncio loop, with one reader."""

    __slots__ = ("_joins", "_news", "_waiter")

    def __init__(self, *, joins: bool) -> None:
        """`joins`: events that wait become one. Not for a reader that may end the request at any token."""
        self._joins = joins
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        """Deliver. An error or an event with a `finish_reason` is the last thing that comes."""
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[News]:
        """Everything that has come; waits until there is something."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        if len(news) == 1 or not self._joins:
            return news
        events = [one for one in news if isinstance(one, TokenEvent)]
        failed = [one for one in news if not isinstance(one, TokenEvent)]  # at most one, at the end
        return [joined(events), *failed] if events else list(failed)


def joined(events: Sequence[TokenEvent]) -> TokenEvent:
    """Consecutive events of a request, at least one, as one: its last may have a `finish_reason`."""
    if len(events) == 1:
        return events[0]
    first, last = events[0], events[-1]
    return TokenEvent(
        first.request_id,
        tuple([token for event in events for token in event.token_ids]),
        tuple([logprob for event in events for logprob in event.logprobs]),
        first.prompt_logprobs,
        last.finish_reason,
        last.stop_token_id,
        first.cached_tokens,
        last.error,
        first.queued_s,
        last.refused,
    )
