"""Engines of the tests on a GPU, stepped in the test's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.runtime.artifact import load_artifact
from ostinato.runtime.config import EngineConfig, KVConfig, SchedulerConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.messages import GenerateRequest
from tests.support.engine_runs import events_of, finish, greedy, tokens_of

RUNNING = 64


def config_of(**sections: Any) -> EngineConfig:
    """64 requests at once and 2 GiB of KV memory, unless said otherwise."""
    defaults = {"kv": KVConfig(max_gib=2, initial_mib=512), "scheduler": SchedulerConfig(max_running=RUNNING)}
    return EngineConfig(**{**defaults, **sections})


def gpu_engine(artifact: Path, **sections: Any) -> Engine:
    """An engine over an artifact; use it as a context manager."""
    config = config_of(**sections)
    model = load_artifact(artifact, config)
    return Engine(model, config)


def backend_of(engine: Engine) -> GpuBackend:
    """Its back end, whose captured graphs some tests look at."""
    backend = engine._backend
    assert isinstance(backend, GpuBackend)
    return backend


def answers(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, tuple[int, ...]]:
    """Run them together; tokens by request. A request that fails fails the test."""
    engine.inbox.put(*requests)
    news = finish(engine)
    out = {}
    for request in requests:
        last = events_of(news, request.request_id)[-1]
        assert last.finish_reason == "length", (request.request_id, last.error)
        out[request.request_id] = tuple(tokens_of(news, request.request_id))
    return out


def asked(cases: Sequence[Any], **sampling: Any) -> list[GenerateRequest]:
    """Greedy requests for the answers of `gpu_models`."""
    return [
        greedy(f"p{at}", case.prompt, len(case.tokens), **sampling)
        for at, case in enumerate(cases)
        if case.tokens
    ]


def wanted(cases: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """What the requests of `asked` must give."""
    return {f"p{at}": case.tokens for at, case in enumerate(cases) if case.tokens}
