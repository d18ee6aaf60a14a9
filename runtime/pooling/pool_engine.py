"""The engine of a model that embeds or scores: whole inputs in, numbers out, one step at a time.

    inbox -> queue -> step (one flat batch of whole sequences) -> results

Nothing is kept between steps, so there is no KV memory and nothing to preempt. One thread calls everything
here except `inbox.put` and `inbox.close`.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ostinato.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestError,
    SleepRefused,
)
from ostinato.graph.facts import ModelFacts, PoolingFacts
from ostinato.ops.step_inputs import PoolInputs
from ostinato.runtime.config import EngineConfig, resolve
from ostinato.runtime.device_health import check_device
from ostinato.runtime.engine import STATS_S, Outlet
from ostinato.runtime.frames import Message
from ostinato.runtime.inbox import Inbox
from ostinato.runtime.messages import (
    Abort,
    Call,
    CallDone,
    EndRequests,
    EngineInfo,
    EngineState,
    EngineStats,
    GenerateRequest,
    KVTarget,
    Order,
    PoolRequest,
    PoolResult,
    PoolResults,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from ostinato.runtime.pooling.pool_check import check_pool_request
from ostinato.runtime.pooling.pool_inputs import moved, pool_inputs
from ostinato.runtime.pooling.pool_queue import PoolQueue, Waiting
from ostinato.runtime.profiler import Profiler
from ostinato.runtime.request_check import check_request, name_in_use, refusal_of
from ostinato.runtime.sleep import check_deeper, wake_weights
from ostinato.runtime.sleeping_weights import Weights

log = logging.getLogger(__name__)


class PoolModel(Protocol):
    """What the engine needs of a loaded artifact."""

    facts: ModelFacts
    folder: Path
    device: torch.device

    @property
    def weights(self) -> Weights:
        """Who holds the memory of its weights."""
        ...

    def name_calls(self, named: bool) -> None:
        """Whether its kernels have names in a profile."""

    def __call__(self, inputs: PoolInputs, kv: tuple[()], /) -> Tensor:
        """Numbers [B, size] of each sequence."""


class PoolEngine:
    """A loaded model with its queue and loop."""

    def __init__(
        self,
        model: PoolModel,
        config: EngineConfig,
        *,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError: settings and model disagree."""
        facts, pooling = model.facts, model.facts.pooling
        if pooling is None:
            raise ConfigError(f"{model.folder}: {facts.architecture} generates; it neither embeds nor scores")
        config = resolve(config, model.device.type)
        if config.max_model_len > facts.max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: the model takes {facts.max_model_len} tokens; lower "
                "it, or use 0"
            )
        self.inbox = inbox or Inbox()
        self._model, self._pooling, self._clock = model, pooling, clock
        self._max_waiting = config.scheduler.max_waiting
        self._queue = PoolQueue(
            max_step_tokens=config.scheduler.max_step_tokens,
            max_step_sequences=config.scheduler.max_running,
        )
        self.info = EngineInfo(
            model=config.server.served_name or model.folder.name,
            vocab_size=facts.vocab_size,
            max_model_len=config.max_model_len or facts.max_model_len,
            block_tokens=config.kv.block_tokens,
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=facts.bos_token_id,
            dtype=facts.dtype,
            artifact=str(model.folder),
            pooling=pooling,
        )
        self._profiler = Profiler(
            config.profile, model.device, name_calls=model.name_calls, wake=self.inbox.wake
        )
        self._steps = self._tokens = 0
        self._asleep = 0
        self._stats_at = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._profiler.close()

    @property
    def has_work(self) -> bool:
        """Whether an input waits."""
        return len(self._queue) > 0

    def serve(self, outlet: Outlet) -> None:
        """Run until the inbox is closed."""
        while not self.inbox.is_closed:
            news = self.step()
            if self._clock() - self._stats_at >= STATS_S:
                news.append(self.stats())
            if news:
                outlet.send(news)
            if not self.has_work or self._asleep:
                outlet.send([self.stats()])
                outlet.idle()
                self.check()
                self.inbox.wait(None)

    def step(self) -> list[Message]:
        """One turn: take the mail, run the next step."""
        self._profiler.tick()
        news = self._admit(self.inbox.drain())
        taken = [] if self._asleep else self._queue.take()
        if taken:
            self._steps += 1
            self._tokens += sum(len(one.request.token_ids) for one in taken)
            news.append(PoolResults(results=tuple(self._run(taken, self._clock()))))
        return news

    def stats(self) -> EngineStats:
        """A snapshot of the books."""
        self._stats_at = self._clock()
        return EngineStats(
            steps=self._steps, waiting=len(self._queue), prompt_tokens=self._tokens, asleep=self._asleep
        )

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        self._queue.check()

    def _admit(self, mail: Sequence[Order]) -> list[Message]:
        """Queue requests and forget others, in the order in which they came."""
        news: list[Message] = []
        for message in mail:
            if isinstance(message, Abort):
                for name in message.request_ids:
                    self._queue.drop(name)
                continue
            if not isinstance(message, PoolRequest | GenerateRequest):
                news += self._answer(message)
                continue
            try:
                self._add(message)
            except RequestError as error:
                news.append(refusal_of(message.request_id, error))
        return news

    def _add(self, request: PoolRequest | GenerateRequest) -> None:
        if isinstance(request, GenerateRequest):
            check_request(request, self.info)  # raises WrongTask
            return
        check_pool_request(request, self.info)
        if request.request_id in self._queue:
            raise name_in_use(request.request_id)
        if len(self._queue) >= self._max_waiting:
            raise Overloaded(
                f"{self._max_waiting} inputs wait already (scheduler.max_waiting); try again later"
            )
        self._queue.add(request, self._clock())

    def _run(self, taken: Sequence[Waiting], began_s: float) -> list[PoolResult]:
        """Results of a step. Where it raises, its halves are tried: who is at fault fails alone."""
        requests = [one.request for one in taken]
        numbers, error = self._numbers(requests)
        if error and len(taken) > 1:
            half = len(taken) // 2
            return self._run(taken[:half], began_s) + self._run(taken[half:], began_s)
        return [
            PoolResult(
                request_id=request.request_id, numbers=made, error=error, queued_s=began_s - one.arrived_s
            )
            for one, request, made in zip(taken, requests, numbers, strict=True)
        ]

    def _numbers(self, requests: Sequence[PoolRequest]) -> tuple[list[str], str]:
        """Of each input, encoded, and no error; or nothing and what went wrong."""
        try:
            rows = self._computed(requests)
            return [
                _encoded(finished(row, request, self._pooling))
                for row, request in zip(rows, requests, strict=True)
            ], ""
        except Exception as wrong:  # a border: whatever a model raises, the other requests go on
            error = f"the step failed: {type(wrong).__name__}: {wrong}"
            if len(requests) == 1:
                log.error("step %d failed; its input ends with an error", self._steps, exc_info=wrong)
            else:
                log.warning(
                    "step %d: %s; each half of its %d inputs is tried", self._steps, error, len(requests)
                )
        if self._model.device.type == "cuda":
            check_device(self._model.device, partial(torch.cuda.synchronize, self._model.device))
            torch.cuda.empty_cache()
        return [""] * len(requests), error

    def _computed(self, requests: Sequence[PoolRequest]) -> Tensor:
        """[B, size] in float32 on the host."""
        inputs = pool_inputs(
            [request.token_ids for request in requests],
            [request.token_types for request in requests],
            self._pooling.pooling,
        )
        step = self._profiler.step(self._steps, len(requests), len(inputs.token_ids))
        with step, torch.inference_mode():
            return self._model(moved(inputs, self._model.device), ()).float().cpu()

    def _answer(self, call: Call) -> list[Message]:
        """Do what a call asks for."""
        began, told = self._clock(), dict[str, Any]()  # Any: fields of CallDone
        news: list[Message] = []
        try:
            match call:
                case Sleep(level=level):
                    self._sleep(level)
                case Wake():
                    self._wake()
                case EndRequests(request_ids=names):
                    ended = [
                        n for n in (self._queue.names() if names is None else names) if self._queue.drop(n)
                    ]
                    told = {"count": len(ended)}
                    news.append(PoolResults(results=tuple(map(_aborted, ended))))
                case ResetPrefixCache():
                    pass  # there is none
                case StartProfile(seconds=seconds):
                    told = {"limit_s": self._profiler.start(seconds)}
                case StopProfile():
                    told = {"trace": self._profiler.stop()}
                case KVTarget():
                    raise InvalidRequest(
                        f"a model to {self._pooling.task} with has no KV memory that could have a target"
                    )
        except EngineError as error:
            log.warning("%s", error)
            param = error.param if isinstance(error, RequestError) else None
            kind = type(error).__name__
            return [CallDone(call_id=call.call_id, error=str(error), kind=kind, param=param)]
        state = EngineState(
            asleep=self._asleep,
            weights_bytes=self._model.weights.resident_bytes,
            seconds=self._clock() - began,
        )
        return [*news, CallDone(call_id=call.call_id, state=state, **told)]

    def _sleep(self, level: int) -> None:
        check_deeper(level, self._asleep)
        if level > self._asleep:
            try:
                self._model.weights.sleep(level)
            except EngineError as error:
                raise SleepRefused(str(error)) from error
        self._asleep = level

    def _wake(self) -> None:
        if self._asleep:
            wake_weights(self._model.weights)
            self._asleep = 0


def finished(row: Tensor, request: PoolRequest, pooling: PoolingFacts) -> Tensor:
    """What a request gets of a row [size] of the model."""
    if pooling.task == "score":
        squeezes = pooling.sigmoid if request.sigmoid is None else request.sigmoid
        return row.sigmoid() if squeezes else row
    kept = row[: request.dimensions]
    normalizes = pooling.normalize if request.normalize is None else request.normalize
    return torch.nn.functional.normalize(kept, dim=0) if normalizes else kept


def _aborted(name: str) -> PoolResult:
    return PoolResult(request_id=name, error="the request was aborted by the server", aborted=True)


def _encoded(numbers: Tensor) -> str:
    return base64.b64encode(numbers.contiguous().numpy().astype("<f4").tobytes()).decode()
