"""From prompts to the HTTP answer, for both completion routes: generate, then stream or collect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from ostinato.runtime.choice_output import ChoiceOutput, Delta
from ostinato.runtime.http.answer_parts import Collected
from ostinato.runtime.http.api_schema import SamplingRequest
from ostinato.runtime.http.choices import Choice, make_choices, run_choices
from ostinato.runtime.http.event_stream import stream_events
from ostinato.runtime.http.server_state import STATE
from ostinato.runtime.messages import SamplingParams


class Rendering(Protocol):
    """How a route writes its answers."""

    id: str

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Events of one delta; may be empty."""

    def closing(self, choices: list[Choice]) -> bytes:
        """Events behind the last delta; may be empty."""

    def body(self, choices: list[Choice], whole: list[Collected]) -> str:
        """The answer in one piece, as JSON."""


async def send_answer(
    request: web.Request,
    fields: SamplingRequest,
    rendering: Rendering,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    make_output: Callable[[SamplingParams, Sequence[int]], ChoiceOutput] | None = None,
) -> web.StreamResponse:
    """Generate `n` choices for each prompt; send them as events or, when all are complete, as one body."""
    state = request.app[STATE]
    choices = make_choices(
        state,
        rendering.id,
        prompts,
        sampling,
        fields.sequences,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        make_output=make_output,
    )
    async with aclosing(run_choices(state, choices)) as deltas:
        if fields.stream:
            return await stream_events(request, deltas, rendering.events, lambda: rendering.closing(choices))
        whole = [Collected() for _ in choices]
        async for choice, delta in deltas:
            whole[choice.index].add(delta)
    return web.Response(text=rendering.body(choices, whole), content_type="application/json")
