"""What is behind an `LLM`: an engine client, a tokenizer, and the loop thread that they live on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

from ostinato.errors import ArtifactError, EngineDead
from ostinato.runtime.bad_words import with_word_ids
from ostinato.runtime.choice_output import ChoiceOutput, Delta
from ostinato.runtime.client import EngineClient
from ostinato.runtime.config import EngineConfig, ServerConfig
from ostinato.runtime.llm_arguments import check_n, check_queueing, checked_text, read_sampling
from ostinato.runtime.messages import FinishReason, GenerateRequest, SamplingParams, TokenEvent, TokenLogprob
from ostinato.runtime.output.registry import choose_formats
from ostinato.runtime.prompt_room import kept_tokens
from ostinato.runtime.request_check import METHODS, check_request, check_task
from ostinato.runtime.request_output import CompletionOutput, RequestOutput
from ostinato.runtime.text import TextFrontEnd
from ostinato.runtime.thinking.thought_marks import ThoughtMarks, thought_marks, with_thoughts

T = TypeVar("T")


class Input(NamedTuple):
    """A prompt: its text, if it was given as text, and its token ids."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One prompt and its requests, one per answer."""

    request_id: str
    input: Input
    requests: tuple[GenerateRequest, ...]


class Session:
    """Runs coroutines on a thread of its own. `run` and the makers of jobs are for any other thread, once it
    is open.
    """

    def __init__(self, client: EngineClient, config: EngineConfig) -> None:
        self.client = client
        self._text: TextFrontEnd | None = None
        self._server = config.server
        self._numbers = count()
        # Requests beyond what the engine would queue wait here instead of being refused.
        self._room = asyncio.Semaphore(config.scheduler.max_waiting)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ostinato-llm", daemon=True)
        self._thread.start()

    def open(self, load_text: Callable[[], TextFrontEnd]) -> None:
        """Start the engine; read tokenizer and chat template meanwhile. Raises what goes wrong in either."""
        starting = asyncio.run_coroutine_threadsafe(self.client.start(), self._loop)
        try:
            self._text = load_text()
            if self._server.reasoning_start_str or self._server.reasoning_end_str:
                _thought_marks(self._text, self._server)  # what is wrong in the settings is known now
            starting.result()
        except ArtifactError as error:
            # the engine has hashed the files: where one is damaged, it knows more than whoever reads it
            reason = starting.exception()
            raise (reason if isinstance(reason, ArtifactError) else error) from None
        except BaseException:
            starting.cancel()
            raise

    @property
    def text(self) -> TextFrontEnd:
        """Tokenizer and chat template."""
        assert self._text is not None, "the session is not open"
        return self._text

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the session's loop and wait for the result; an interrupt cancels the work."""
        try:
            self.check_open()
        except EngineDead:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def room(self) -> asyncio.Semaphore:
        """Held by a request while the engine has it."""
        return self._room

    def next_name(self) -> str:
        """Of a request, in no use."""
        return f"llm-{next(self._numbers)}"

    def check_open(self) -> None:
        """EngineDead if nothing can run here."""
        if os.getpid() != self._pid:
            raise EngineDead(
                f"this LLM lives in process {self._pid}, this is its fork {os.getpid()}, and threads do not "
                "survive a fork: make the LLM in the child"
            )
        if self._loop.is_closed():
            raise EngineDead("this LLM is closed: make a new one")

    def check_generates(self) -> None:
        """EngineDead as above; WrongTask for a model to embed or score with."""
        self.check_open()
        check_task("generate", self.client.info, METHODS)

    def close(self) -> None:
        """Stop engine, tokenizer threads and loop. In a fork there is nothing to stop."""
        if os.getpid() != self._pid:
            return
        self.run(self.client.close())
        if self._text is not None:
            self._text.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def encode(self, prompt: str | tuple[int, ...], kept: int | None = None) -> Input:
        """An input from text or token ids, of which the last `kept` are used.

        ContextTooLong for text that leaves no room for an answer.
        """
        if not isinstance(prompt, str):
            return Input(None, prompt if kept is None else prompt[-kept:])
        if not prompt:
            return Input(prompt, ())
        if kept is not None:
            return Input(prompt, tuple(self.text.encode(prompt)[-kept:]))
        return Input(prompt, tuple(self.text.encode_within(self._window, prompt, param="prompt")))

    def render(
        self, messages: Sequence[Mapping[str, object]], *, kept: int | None = None, **template: Any
    ) -> Input:
        """An input from a conversation, through a chat template; `kept` as in `encode`."""
        text = self.text.render_chat([dict(message) for message in messages], **template)
        checked_text(text, "messages", "messages, rendered by the chat template")
        if kept is not None:
            return Input(text, tuple(self.text.encode(text, add_special_tokens=False)[-kept:]))
        ids = self.text.encode_within(self._window, text, param="messages", add_special_tokens=False)
        return Input(text, tuple(ids))

    @property
    def _window(self) -> int:
        return self.client.info.max_model_len

    def sampling(
        self, given: SamplingParams | Sequence[SamplingParams] | None, prompts: int
    ) -> Sequence[SamplingParams]:
        """One for each prompt; None: the model's own defaults."""
        if given is None:
            given = SamplingParams(**self.text.defaults.model_dump(exclude_none=True))
        return read_sampling(given, prompts)

    def kept(self, truncate: int | None, several: Sequence[SamplingParams]) -> list[int | None]:
        """How many tokens of each prompt are used."""
        return [kept_tokens(truncate, one.max_tokens, self._window) for one in several]

    def jobs(
        self,
        inputs: Sequence[Input],
        several: Sequence[SamplingParams],
        n: int,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Job]:
        """Jobs whose requests are all known to be valid. Raises InvalidRequest or ContextTooLong."""
        check_n(n)
        check_queueing(priority, cache_salt)
        template = GenerateRequest(
            request_id="",
            prompt_token_ids=(),
            sampling=SamplingParams(),
            priority=priority,
            cache_salt=cache_salt,
        )
        return [self._job(one, params, n, template) for one, params in zip(inputs, several, strict=True)]

    async def answer_all(
        self, jobs: Sequence[Job], advance: Callable[[int, int], None]
    ) -> list[RequestOutput]:
        """Run all jobs together; `advance` gets finished answers and new tokens."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [[group.create_task(self._collect(r, advance)) for r in job.requests] for job in jobs]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        answers = [[task.result() for task in row] for row in tasks]
        return [
            RequestOutput(
                job.request_id,
                job.input.text,
                job.input.token_ids,
                tuple(answer.output(index) for index, answer in enumerate(row)),
                row[0].prompt_logprobs,
                row[0].cached_tokens,
            )
            for job, row in zip(jobs, answers, strict=True)
        ]

    async def pieces(self, request: GenerateRequest) -> AsyncGenerator[CompletionOutput]:
        """What comes of a request, piece by piece; runs on the caller's loop."""
        here = asyncio.get_running_loop()
        queue: asyncio.Queue[CompletionOutput | Exception] = asyncio.Queue()

        async def pump() -> None:
            try:
                async with aclosing(self._steps(request)) as steps:
                    async for _, piece in steps:
                        here.call_soon_threadsafe(queue.put_nowait, piece)
            except Exception as error:  # nothing is swallowed: the reader raises it
                here.call_soon_threadsafe(queue.put_nowait, error)

        self.check_open()
        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            pumping.cancel()

    def _job(self, one: Input, params: SamplingParams, n: int, template: GenerateRequest) -> Job:
        params = with_word_ids(self.text, params)
        if params.thinking_token_budget is not None and params.thoughts is None:
            params = self._with_thoughts(params, one.token_ids)
        name = f"llm-{next(self._numbers)}"
        seeds = [None if params.seed is None else (params.seed + which) % 2**63 for which in range(n)]
        requests = tuple(
            template.model_copy(
                update={
                    "request_id": f"{name}-{which}",
                    "prompt_token_ids": one.token_ids,
                    "sampling": params.model_copy(update={"seed": seed}),
                }
            )
            for which, seed in enumerate(seeds)
        )
        check_request(requests[0], self.client.info)
        return Job(name, one, requests)

    def _with_thoughts(self, params: SamplingParams, prompt_ids: Sequence[int]) -> SamplingParams:
        marks = _thought_marks(self.text, self._server)
        prompt = self.text.codec.decode(prompt_ids, skip_special=False)
        return with_thoughts(params, marks, begun=None if marks is None else marks.begun_in(prompt))

    async def _steps(self, request: GenerateRequest) -> AsyncGenerator[tuple[TokenEvent, CompletionOutput]]:
        """Events of a request with the text that they add; a stop string ends it, closing aborts it."""
        output = ChoiceOutput(self.text.codec, request.sampling)
        wants_logprobs = request.sampling.logprobs is not None
        async with self._room:
            # Every engine's iterator is an async generator: closing it is what aborts the request.
            events = cast("AsyncGenerator[TokenEvent]", self.client.generate(request))
            async with aclosing(events):
                async for event in events:
                    delta = output.push(event)
                    logprobs = event.logprobs if wants_logprobs else None
                    yield (
                        event,
                        CompletionOutput(
                            0, delta.text, event.token_ids, logprobs, delta.finish_reason, event.error
                        ),
                    )
                    if delta.finish_reason is not None:
                        return

    async def _collect(self, request: GenerateRequest, advance: Callable[[int, int], None]) -> _Answer:
        """A whole answer: `_steps`, without a piece for each event."""
        answer = _Answer(request.sampling.logprobs is not None)
        output = ChoiceOutput(self.text.codec, request.sampling)
        async with self._room:
            events = cast("AsyncGenerator[TokenEvent]", self.client.generate(request))
            async with aclosing(events):
                async for event in events:
                    delta = output.push(event)
                    answer.add(event, delta)
                    advance(delta.finish_reason is not None, len(event.token_ids))
                    if delta.finish_reason is not None:
                        break
        return answer


def _thought_marks(text: TextFrontEnd, server: ServerConfig) -> ThoughtMarks | None:
    formats = choose_formats(server.reasoning_parser, "none", text.chat_template)
    return thought_marks(formats, text, start=server.reasoning_start_str, end=server.reasoning_end_str)


class _Answer:
    """What has come of a request."""

    def __init__(self, wants_logprobs: bool) -> None:
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.cached_tokens = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if wants_logprobs else None
        self._is_new = True
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None

    def add(self, event: TokenEvent, delta: Delta) -> None:
        """An event, and the text that it adds."""
        if self._is_new:
            self.prompt_logprobs, self.cached_tokens = event.prompt_logprobs, event.cached_tokens
            self._is_new = False
        self._text.append(delta.text)
        self._token_ids += event.token_ids
        if self._logprobs is not None:
            self._logprobs += event.logprobs
        self._finish_reason, self._error = delta.finish_reason, event.error

    def output(self, index: int) -> CompletionOutput:
        """All of it as one."""
        return CompletionOutput(
            index,
            "".join(self._text),
            tuple(self._token_ids),
            None if self._logprobs is None else tuple(self._logprobs),
            self._finish_reason,
            self._error,
        )
