"""Short ways to run an engine on the toy model in this thread, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.runtime.config import CpuConfig, EngineConfig, KVConfig, SchedulerConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.frames import Events, Message
from ostinato.runtime.messages import GenerateRequest, SamplingParams, TokenEvent
from tests.support.toy_model import FACTS, ToyModel

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * FACTS.kv_token_bytes(4)


def toy_config(*, blocks: int = 4096, max_step_tokens: int = 512, **sections: object) -> EngineConfig:
    """At most `blocks` KV blocks; threads unbound, because tests share the cores."""
    kv = KVConfig(initial_mib=1, max_gib=blocks * BLOCK_BYTES / 2**30, headroom_gib=0)
    defaults = {
        "kv": kv,
        "cpu": CpuConfig(bind=False),
        "scheduler": SchedulerConfig(max_step_tokens=max_step_tokens),
    }
    return EngineConfig(**{**defaults, **sections})


def toy_engine(**settings: object) -> Engine:
    """An engine on a fresh toy model; use it as a context manager."""
    return Engine(ToyModel(), toy_config(**settings))


def greedy(name: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: object) -> GenerateRequest:
    """A request for exactly `max_tokens` greedy tokens."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids from 2 to 121, different for each seed."""
    return [(seed * 31 + at * at * 7 + at * 3) % 120 + 2 for at in range(length)]


def finish(engine: Engine) -> list[Message]:
    """Step until nothing is left to do; everything that the engine said."""
    news = engine.step()
    while engine.has_work:
        news += engine.step()
    return news


def events_of(news: Sequence[Message], name: str) -> list[TokenEvent]:
    """The events of one request, in order."""
    events = [event for message in news if isinstance(message, Events) for event in message.events]
    return [event for event in events if event.request_id == name]


def tokens_of(news: Sequence[Message], name: str) -> list[int]:
    """All tokens that one request got."""
    return [token for event in events_of(news, name) for token in event.token_ids]


def generate(engine: Engine, *requests: GenerateRequest) -> dict[str, list[int]]:
    """Run the requests together to their end; tokens by request."""
    engine.inbox.put(*requests)
    news = finish(engine)
    return {request.request_id: tokens_of(news, request.request_id) for request in requests}
