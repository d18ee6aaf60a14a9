"""A reader's mail: nothing is lost or reordered, and what waits is said in as few events as possible."""

import asyncio

import pytest

from ostinato.errors import EngineDead
from ostinato.runtime.engine_thread import LoopOutlet
from ostinato.runtime.inbox import Inbox
from ostinato.runtime.messages import TokenEvent, TokenLogprob
from ostinato.runtime.reader_mail import ReaderMail, joined

SCORED = tuple(TokenLogprob(token_id=i, logprob=-0.5, rank=1) for i in range(3))
EVENTS = (
    TokenEvent("r", (0,), (SCORED[0],), (None, SCORED[2]), cached_tokens=16),
    TokenEvent("r", (1,), (SCORED[1],)),
    TokenEvent("r", (2,), (SCORED[2],), finish_reason="stop", stop_token_id=2),
)


def test_joined_events_say_what_they_said_apart() -> None:
    assert joined(EVENTS) == TokenEvent(
        "r",
        (0, 1, 2),
        SCORED,
        (None, SCORED[2]),
        finish_reason="stop",
        stop_token_id=2,
        cached_tokens=16,
    )
    failed = TokenEvent("r", finish_reason="error", error="NaN", refused=True)
    assert joined([EVENTS[1], failed]) == TokenEvent(
        "r", (1,), (SCORED[1],), finish_reason="error", error="NaN", refused=True
    )
    assert joined(EVENTS[:1]) is EVENTS[0]


async def test_a_late_reader_takes_everything_at_once_and_an_early_one_waits() -> None:
    mail = ReaderMail(joins=True)
    for event in EVENTS[:2]:
        mail.put(event)
    assert [event.token_ids for event in await mail.take()] == [(0, 1)]
    waiting = asyncio.create_task(mail.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    mail.put(EVENTS[1])
    mail.put(EVENTS[2])
    (last,) = await waiting
    assert (last.token_ids, last.finish_reason) == ((1, 2), "stop")


async def test_an_error_comes_behind_the_tokens_that_were_there_before_it() -> None:
    mail, reason = ReaderMail(joins=True), EngineDead("gone")
    for news in (*EVENTS[:2], reason):
        mail.put(news)
    event, error = await mail.take()
    assert isinstance(event, TokenEvent)
    assert (event.token_ids, error) == ((0, 1), reason)
    mail.put(reason)
    assert await mail.take() == [reason]


async def test_events_of_a_reader_that_may_stop_at_any_token_stay_apart() -> None:
    mail = ReaderMail(joins=False)
    for event in EVENTS:
        mail.put(event)
    assert await mail.take() == list(EVENTS)


async def test_a_reader_that_gives_up_waiting_loses_nothing() -> None:
    mail = ReaderMail(joins=True)
    waiting = asyncio.create_task(mail.take())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    mail.put(EVENTS[0])
    assert await mail.take() == [EVENTS[0]]


async def test_news_in_a_row_are_handed_over_together_and_the_last_ones_at_once() -> None:
    loop = asyncio.get_running_loop()
    deliveries: list[list[int]] = []
    inbox = Inbox()
    outlet = LoopOutlet(loop, lambda news: deliveries.append(list(news)), inbox)  # type: ignore[arg-type]
    outlet.send([1])  # type: ignore[list-item]
    outlet.send([2])  # type: ignore[list-item]
    assert deliveries == []
    await asyncio.sleep(0)
    assert deliveries == [[1, 2]]
    outlet.send([3])  # type: ignore[list-item]  # while the loop rests
    for _ in range(3):
        await asyncio.sleep(0)
    assert deliveries == [[1, 2]]
    outlet.idle()
    await asyncio.sleep(0)
    assert deliveries == [[1, 2], [3]]
    outlet.send([4])  # type: ignore[list-item]
    while len(deliveries) < 3:
        await asyncio.sleep(0.001)
    assert deliveries[2] == [4]
    assert not inbox.is_closed
