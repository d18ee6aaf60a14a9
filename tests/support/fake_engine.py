"""A scripted EngineClient: it says what the test tells it to say, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from ostinato.errors import EngineDead, EngineError
from ostinato.runtime.frames import FrameReader, encode
from ostinato.runtime.messages import (
    EngineInfo,
    EngineState,
    EngineStats,
    FinishReason,
    GenerateRequest,
    TokenEvent,
    TokenLogprob,
)

Script = Callable[[GenerateRequest], Sequence[TokenEvent | Exception]]


@dataclass
class FakeEngine:
    """Each request plays `script`; an exception in it is raised there. With `gate` set, events wait for it.

    `step_s` is slept between events, 0 only yields.  Lengths are honoured: after `max_tokens` tokens the
    sequence ends with `length`, whatever the script says.
    """

    script: Script
    info: EngineInfo
    step_s: float = 0.0
    gate: asyncio.Event | None = None
    dead: str | None = None
    stalled: float = 0.0
    requests: list[GenerateRequest] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)  # request id -> "abort it"
    aborted: list[str] = field(default_factory=list)
    calls: list[tuple[str, float | None]] = field(default_factory=list)  # of memory
    asleep: int = 0
    refuses: EngineError | None = None  # what the next such call raises
    started: bool = False
    closed: bool = False

    @property
    def stats(self) -> EngineStats:
        running = len(self.running)
        return EngineStats(running=running, blocks_capacity=100, blocks_committed=10, asleep=self.asleep)

    @property
    def stalled_seconds(self) -> float:
        if self.dead is not None:
            raise EngineDead(self.dead)
        return self.stalled

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    async def set_kv_target(self, target_bytes: int | None) -> EngineState:
        return self._called("kv", target_bytes, self.asleep)

    async def sleep(self, level: int) -> EngineState:
        return self._called("sleep", level, level)

    async def wake(self) -> EngineState:
        return self._called("wake", None, 0)

    async def reset_prefix_cache(self) -> int:
        self._called("reset_prefix_cache", None, self.asleep)
        return 3

    async def end_requests(self, request_ids: Sequence[str] | None) -> int:
        names = list(self.running) if request_ids is None else request_ids
        self._called("end", None if request_ids is None else len(request_ids), self.asleep)
        await self.abort([*names])
        return len(names)

    async def start_profile(self, seconds: float | None) -> float:
        self._called("start_profile", seconds, self.asleep)
        return seconds or 30.0

    async def stop_profile(self) -> str:
        self._called("stop_profile", None, self.asleep)
        return "/traces/trace-1.json"

    def _called(self, what: str, argument: float | None, asleep: int) -> EngineState:
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.refuses is not None:
            raise self.refuses
        self.calls.append((what, argument))
        self.asleep = asleep
        target = argument if what == "kv" else None
        return EngineState(asleep=asleep, kv_bytes=64, kv_target_bytes=target)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.running:
                self.running[request_id].set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        self.requests.append(request)
        FrameReader().feed(encode(request))  # one that the engine's process cannot read would be its end
        if self.dead is not None:
            raise EngineDead(self.dead)
        abort = self.running[request.request_id] = asyncio.Event()
        finished = False
        try:
            left = request.sampling.max_tokens or 1 << 30
            for event in self.script(request):
                await self._wait(abort)
                if abort.is_set():
                    finished = True
                    yield TokenEvent(request_id=request.request_id, finish_reason="abort")
                    return
                if isinstance(event, Exception):
                    raise event
                left -= len(event.token_ids)
                if left <= 0 and event.finish_reason is None:
                    event = replace(event, finish_reason="length")
                finished = event.finish_reason is not None
                yield event
                if finished:
                    return
        finally:
            del self.running[request.request_id]
            if not finished:
                self.aborted.append(request.request_id)

    async def _wait(self, abort: asyncio.Event) -> None:
        if self.gate is None:
            await asyncio.sleep(self.step_s)
            return
        waits = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(abort.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def info(*, vocab_size: int, max_model_len: int = 64, eos: int = 0) -> EngineInfo:
    """Facts of a small model."""
    return EngineInfo(
        model="toy",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        block_tokens=16,
        eos_token_ids=(eos,),
        dtype="float32",
        artifact="toy",
    )


def say(
    ids: Sequence[int],
    *,
    reason: FinishReason = "stop",
    stop_id: int | None = None,
    chunk: int = 1,
    top: int = 0,
) -> Script:
    """A script that emits `ids` (then `stop_id`, when given), `chunk` at a time, and ends."""
    all_ids = [*ids] if stop_id is None else [*ids, stop_id]

    def script(request: GenerateRequest) -> list[TokenEvent]:
        wanted = request.sampling.logprobs
        events = []
        for at in range(0, len(all_ids), chunk):
            part = tuple(all_ids[at : at + chunk])
            last = at + chunk >= len(all_ids)
            events.append(
                TokenEvent(
                    request_id=request.request_id,
                    token_ids=part,
                    logprobs=()
                    if wanted is None
                    else tuple(_logprob(i, wanted, request.sampling.logprob_token_ids) for i in part),
                    prompt_logprobs=_prompt_logprobs(request) if at == 0 else None,
                    finish_reason=reason if last else None,
                    stop_token_id=stop_id if last else None,
                )
            )
        return events

    return script


def _logprob(token_id: int, wanted: int, named: Sequence[int] = ()) -> TokenLogprob:
    """-0.5 for the chosen token; of the others the second is impossible, as after top-k masking."""
    if named:
        top = tuple((i, -float(i)) for i in named)
        return TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=top)
    others = [(token_id, -0.5), (1, float("-inf")), *((i, -float(i)) for i in range(2, 30))]
    return TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=tuple(others[:wanted]))


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob | None, ...] | None:
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return None
    return (None, *(_logprob(i, wanted) for i in request.prompt_token_ids[1:]))
