"""Responses that this server knows: those kept in the store, and those made in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from aiohttp import web

from ostinato.errors import EngineError
from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.http.api_errors import ResponseNotFound
from ostinato.runtime.http.api_keys import Caller
from ostinato.runtime.http.chat_run import FieldNames, run_chat
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.responses_render import ResponseAnswer
from ostinato.runtime.http.responses_store import ResponseStore, StoredResponse
from ostinato.runtime.http.server_state import ServerState

log = logging.getLogger(__name__)


@dataclass
class ResponseRun:
    """One response being made: who asked, what came before, and the answer as far as it is."""

    caller: Caller
    choice: Choice
    names: FieldNames
    answer: ResponseAnswer
    earlier: tuple[str, ...]  # items of the conversation so far
    new: tuple[str, ...]  # items of this request
    keeps: bool
    background: bool

    @property
    def owner(self) -> str:
        """Whose response it is."""
        return self.caller.name

    async def frames(self, state: ServerState, *, begun: bool = False) -> AsyncGenerator[list[bytes]]:
        """Generate. What goes wrong is raised; closing it ends the sequence.

        `begun`: the beginning is told already.
        """
        async with aclosing(run_chat(state, self.choice, self.names)) as news:
            async for events, tokens, reason, thought in news:
                out = [] if begun else self.answer.begin()
                begun = True
                self.answer.reasoning_tokens = thought
                out += self.answer.push(events, tokens)
                if reason is not None:
                    out += self.answer.finish(reason)
                yield out

    def stored(self, frames: list[bytes]) -> StoredResponse:
        """What is kept of it once it has ended."""
        output = [(str(item["id"]), dump(item)) for item in self.answer.output()]
        return StoredResponse(
            owner=self.owner,
            body=dump(self.answer.body()),
            input_items=self.new,
            output_items=tuple(output),
            history=(*self.earlier, *self.new, *(item for _, item in output)),
            background=self.background,
            frames=tuple(frames),
        )


@dataclass
class _Background:
    run: ResponseRun
    frames: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def add(self, frames: list[bytes]) -> None:
        self.frames += frames
        self.changed.set()
        self.changed = asyncio.Event()


class Responses:
    """The responses of one server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        config = state.config
        self.store = ResponseStore(int(config.store_mib * 2**20), config.store_ttl_s)
        self._running: dict[str, _Background] = {}

    def body(self, response_id: str, owner: str) -> str:
        """A response as JSON, finished or not. ResponseNotFound."""
        if (background := self._of(response_id, owner)) is not None:
            return dump(background.run.answer.body())
        return self.stored(response_id, owner).body

    def stored(self, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """A finished response. ResponseNotFound also while it is being made; `param`: the field to blame."""
        stored = self.store.get(response_id, owner)
        if stored is None:
            blamed = "" if param is None else f"{param}: "
            raise ResponseNotFound(
                f"{blamed}response {response_id[:80]!r} is not here: it was not stored, is not finished, its "
                "time (server.store_ttl_s) is over, or newer ones needed its room (server.store_mib)",
                param=param,
            )
        return stored

    def keep(self, run: ResponseRun) -> None:
        """Store a response of the foreground that has ended, if it is to be stored."""
        if run.keeps:
            self.store.put(run.answer.id, run.stored([]))

    def has_frames(self, response_id: str, owner: str) -> bool:
        """Whether `follow` has anything to tell of this response."""
        background = self._of(response_id, owner)
        return bool(background.frames if background else self.stored(response_id, owner).frames)

    def start(self, run: ResponseRun) -> AsyncGenerator[bytes]:
        """Make a response in the background; returns its frames as they come.

        It counts among the requests of its caller that run at once, as the one that asked for it does.
        """
        run.caller.allowance.running += 1
        background = self._running[run.answer.id] = _Background(run)
        background.add(run.answer.begin())
        background.task = asyncio.create_task(self._make(background))
        background.task.add_done_callback(lambda _: self._settle(background))
        return self.follow(run.answer.id, run.owner, 0)

    async def _make(self, background: _Background) -> None:
        run = background.run
        try:
            async with aclosing(run.frames(self._state, begun=True)) as frames:
                async for some in frames:
                    background.add(some)
        except Exception as error:  # border: nobody waits for this task
            if not isinstance(error, EngineError):
                log.exception("error in a background response")
            background.add(run.answer.fail(error))

    def _settle(self, background: _Background) -> None:
        """Its task is over, which may have been cancelled before it began."""
        run = background.run
        if run.answer.status == "in_progress":
            background.add(run.answer.cancel())
        run.caller.allowance.leave()
        if self._running.pop(run.answer.id, None) is not None:
            self.store.put(run.answer.id, run.stored(background.frames))
        background.changed.set()

    async def follow(self, response_id: str, owner: str, first: int) -> AsyncGenerator[bytes]:
        """Frames of a background response that was asked for as a stream, from number `first` on."""
        background = self._of(response_id, owner)
        if background is None:
            for some in self.stored(response_id, owner).frames[first:]:
                yield some
            return
        while True:
            changed = background.changed
            if new := background.frames[first:]:
                first += len(new)
                yield b"".join(new)
            elif background.task is not None and background.run.answer.status != "in_progress":
                return
            else:
                await changed.wait()

    async def cancel(self, response_id: str, owner: str) -> str | None:
        """End a background response; its body, or None for one that is not of the background."""
        if (background := self._of(response_id, owner)) is not None:
            await _end(background)
            return dump(background.run.answer.body())  # the store may have had no room for it
        stored = self.stored(response_id, owner)
        return stored.body if stored.background else None

    async def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, which ends it if it is still being made. ResponseNotFound."""
        if (background := self._of(response_id, owner)) is not None:
            del self._running[response_id]
            await _end(background)
            return
        self.stored(response_id, owner)
        self.store.delete(response_id)

    async def close(self) -> None:
        """End all that is being made."""
        for background in list(self._running.values()):
            await _end(background)

    def _of(self, response_id: str, owner: str) -> _Background | None:
        background = self._running.get(response_id)
        return background if background is not None and background.run.owner == owner else None


async def _end(background: _Background) -> None:
    assert background.task is not None  # set where it is made
    background.task.cancel()
    await asyncio.gather(background.task, return_exceptions=True)


RESPONSES: web.AppKey[Responses] = web.AppKey("ostinato_responses", Responses)
