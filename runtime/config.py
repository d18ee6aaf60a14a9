"""`EngineConfig`: every setting of a running engine, declared once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from ostinato.errors import ConfigError
from ostinato.graph.config import GraphConfig
from ostinato.passes.config import PassesConfig
from ostinato.section import Section


class KVConfig(Section):
    """KV memory: starts small, grows when free blocks run low, stops at `max_gib` or `headroom_gib`."""

    block_tokens: int = Field(16, ge=1, le=256, description="tokens in one KV block")
    initial_mib: int = Field(64, ge=1, description="MiB committed at start")
    max_gib: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="GiB at most; 0: all that is really free"
    )
    headroom_gib: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="GiB of memory always left to others"
    )
    idle_shrink_s: float = Field(
        30.0, ge=0, description="seconds of idleness before memory goes back; 0: never"
    )
    ahead_mib: int = Field(
        -1, ge=-1, description="MiB of free blocks below which memory grows ahead of need; -1: by the device"
    )
    wait_s: float = Field(
        10.0, ge=0, description="seconds that a request which fits nowhere waits for memory of others"
    )
    share: bool = Field(
        False, description="give idle memory to other engines of this user on the device that need it"
    )
    prefix_cache: bool = Field(True, description="reuse KV blocks of equal prefixes")


class SchedulerConfig(Section):
    """Who runs next."""

    max_running: int = Field(256, ge=1, le=4096, description="sequences decoded at once")
    max_step_tokens: int = Field(
        0, ge=0, le=8192, description="tokens of one step, prefill and decode; 0: 512 on a CPU, 4096 on a GPU"
    )
    max_waiting: int = Field(4096, ge=1, description="requests in the queue before new ones get 429")


class CpuConfig(Section):
    """Threads of the CPU back end, chosen and bound once at start."""

    threads: int = Field(0, ge=0, le=1024, description="compute threads; 0: physical cores of this process")
    bind: bool = Field(True, description="bind each compute thread to one core")


class GpuConfig(Section):
    """CUDA graphs of the GPU back end."""

    graph_tokens: int = Field(
        1024, ge=0, le=8192, description="steps of up to so many tokens are captured; 0: nothing is"
    )


class ServerConfig(Section):
    """The HTTP front end."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port; 0: any free one")
    api_key: str = Field(
        "", description="required as Bearer token when set; better given as OSTINATO_API_KEY"
    )
    admin_key: str = Field(
        "",
        description="Bearer token of the /admin routes, which do not exist without; better given as "
        "OSTINATO_ADMIN_KEY",
    )
    served_name: str = Field("", description="model name that clients use; empty: the artifact's own")
    max_body_mib: float = Field(32.0, gt=0, allow_inf_nan=False, description="largest request body, MiB")
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get to finish on shutdown")
    stall_s: float = Field(30.0, gt=0, description="seconds without step progress before /health fails")
    max_n: int = Field(16, ge=1, le=128, description="most choices (`n`) of one request")
    max_logprobs: int = Field(20, ge=0, le=1000, description="most alternatives per token")


class EngineConfig(Section):
    """All settings; the one object that `compile-model`, the server and `LLM` take."""

    graph: GraphConfig = GraphConfig()
    passes: PassesConfig = PassesConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cpu: CpuConfig = CpuConfig()
    gpu: GpuConfig = GpuConfig()
    server: ServerConfig = ServerConfig()
    max_model_len: int = Field(0, ge=0, description="context window in tokens; 0: the model's own")
    log_level: str = Field(
        "INFO", pattern="^(?i:debug|info|warning|error)$", description="least level that is logged"
    )


_STEP_TOKENS = {"cpu": 512, "cuda": 4096}


def resolve(config: EngineConfig, device: str) -> EngineConfig:
    """A copy in which everything that depends on the type of the device is settled."""
    scheduler = config.scheduler
    if scheduler.max_step_tokens == 0:
        scheduler = scheduler.model_copy(update={"max_step_tokens": _STEP_TOKENS[device]})
    return config.model_copy(update={"scheduler": scheduler})


def read_settings(tree: Mapping[str, Any], *, hint: str) -> EngineConfig:
    """A tree of given settings as a config. ConfigError names the first wrong one and ends with `hint`."""
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}={first['input']!r}: {first['msg']}; {hint}") from None
