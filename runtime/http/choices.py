"""Run the sequences of one request together: events of all of them in one stream, one fate for all."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from ostinato.errors import EngineError, InvalidRequest, RequestAborted, RequestError
from ostinato.runtime.choice_output import ChoiceOutput, Delta
from ostinato.runtime.grammar.grammar_spec import grammar_param, has_grammar
from ostinato.runtime.http.api_errors import GenerationTimeout
from ostinato.runtime.http.request_record import CURRENT
from ostinato.runtime.http.server_state import ServerState
from ostinato.runtime.messages import GenerateRequest, SamplingParams, TokenEvent, TokenLogprob


@dataclass
class Choice:
    """One sequence of an answer, at `index` among its choices."""

    index: int
    request: GenerateRequest
    output: ChoiceOutput
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    logprob: float = 0.0  # sum over its tokens, if log-probabilities were asked for
    new_ids: list[int] = field(default_factory=list, repr=False)  # generated, not yet taken by the renderer
    events: int = field(default=0, repr=False)

    def take_ids(self) -> list[int]:
        """Tokens generated since this was called last."""
        ids, self.new_ids = self.new_ids, []
        return ids


def make_choices(
    state: ServerState,
    request_id: str,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    n: int,
    *,
    priority: int,
    cache_salt: str,
    make_output: Callable[[SamplingParams, Sequence[int]], ChoiceOutput] | None = None,
) -> list[Choice]:
    """`n` sequences for each prompt, in the order of OpenAI's indices.

    `make_output`: what reads a sequence; else its text is all content, and its stop token is listed.  Each
    has its own seed: the request's plus its number among the n, or a drawn one.
    """
    choices: list[Choice] = []
    for prompt_ids, params in zip(prompts, sampling, strict=True):
        ids = tuple(prompt_ids)
        for which in range(n):
            index = len(choices)
            seed = secrets.randbits(63) if params.seed is None else (params.seed + which) % 2**63
            own = params.model_copy(update={"seed": seed})
            request = GenerateRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=ids,
                sampling=own,
                priority=priority,
                cache_salt=cache_salt,
            )
            if make_output is None:
                output = ChoiceOutput(state.text.codec, own, lists_stop=True)
            else:
                output = make_output(own, ids)
            choices.append(Choice(index, request, output))
    return choices


def run_choices(state: ServerState, choices: list[Choice]) -> AsyncGenerator[tuple[Choice, Delta]]:
    """Deltas of all choices as they come. Closing it, or one failure, ends all of them in the engine.

    Raises what the engine raises, and RequestAborted or EngineError for a choice that ends so.
    """
    return _run(state, choices[0]) if len(choices) == 1 else _run_together(state, choices)


async def _run_together(state: ServerState, choices: list[Choice]) -> AsyncGenerator[tuple[Choice, Delta]]:
    merged: asyncio.Queue[tuple[Choice, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(_run(state, choice)) as deltas:
                async for item in deltas:
                    merged.put_nowait(item)
        except Exception as error:  # nothing is swallowed: the consumer raises it
            merged.put_nowait(error)
        else:
            merged.put_nowait(None)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    running = len(tasks)
    try:
        while running:
            news = await merged.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                running -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(state: ServerState, choice: Choice) -> AsyncGenerator[tuple[Choice, Delta]]:
    request = choice.request
    clock = state.metrics.clock(len(request.prompt_token_ids))
    outcome = "cancelled"
    late = _AbortLater(state, request.request_id)
    record = CURRENT.get()
    state.live[request.request_id] = record.id if record is not None else ""
    try:
        # Every engine's iterator is an async generator: closing it is what aborts the request.
        events = cast("AsyncGenerator[TokenEvent]", state.engine.generate(request))
        async with aclosing(events):
            async for event in events:
                clock.tokens(len(event.token_ids))
                if not choice.events:
                    choice.cached_tokens, choice.prompt_logprobs = event.cached_tokens, event.prompt_logprobs
                    clock.times.cached_tokens = event.cached_tokens
                    clock.queued(event.queued_s)
                choice.events += 1
                before = choice.output.num_tokens
                delta = choice.output.push(event)
                choice.new_ids += event.token_ids[: choice.output.num_tokens - before]
                if event.logprobs:
                    choice.logprob += sum(record.logprob for record in event.logprobs)
                if event.finish_reason in ("abort", "error") and delta.finish_reason != "stop":
                    outcome = event.finish_reason
                    if outcome == "abort":
                        late.complain()
                        raise RequestAborted(event.error or "the request was aborted by the server")
                    if event.refused:
                        raise _refusal(request.sampling, event.error or "")
                    raise EngineError(event.error or "the engine failed on this request")
                outcome = delta.finish_reason or outcome
                yield choice, delta
                if delta.finish_reason is not None:
                    return
        raise EngineError("the engine ended the request without a reason")
    except (RequestAborted, GenerationTimeout):
        raise
    except RequestError:
        outcome = "refused"
        raise
    except EngineError:
        outcome = "error"
        raise
    finally:
        late.cancel()
        state.live.pop(request.request_id, None)
        clock.end(outcome)


def _refusal(sampling: SamplingParams, why: str) -> InvalidRequest:
    """What a client asked for cannot be, as turned out while it was made."""
    if not has_grammar(sampling):
        return InvalidRequest(why)
    param = grammar_param(sampling)
    return InvalidRequest(f"{param}: {why}", param=param)


class _AbortLater:
    """Aborts a sequence that takes longer than `server.request_timeout_s`."""

    def __init__(self, state: ServerState, request_id: str) -> None:
        self._state = state
        self._request_id = request_id
        self._abort: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if limit_s := state.config.request_timeout_s:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._fire)

    def complain(self) -> None:
        """Raise GenerationTimeout if it did."""
        if self._abort is not None:
            limit_s = self._state.config.request_timeout_s
            raise GenerationTimeout(
                f"the answer was not complete within {limit_s:g} s (server.request_timeout_s)"
            )

    def cancel(self) -> None:
        """The sequence is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._abort = asyncio.create_task(self._state.engine.abort([self._request_id]))
