"""`EngineConfig`: every setting of a running engine, declared once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

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


MAX_PROFILE_S = 600  # 6 GB of a busy engine


class ProfileConfig(Section):
    """Profiles of the engine's process: `POST /admin/profile/start` and `stop`, `LLM.start_profile`."""

    folder: str = Field("", description="folder that Chrome traces are written to; empty: no profiles")
    max_seconds: float = Field(
        30.0,
        gt=0,
        le=MAX_PROFILE_S,
        allow_inf_nan=False,
        description="seconds after which a profile ends by itself",
    )


class LimitsConfig(Section):
    """What one API key may use; without keys all callers share them. 0: no limit. Else 429 `rate_limited`."""

    concurrent: int = Field(0, ge=0, description="requests at once of one key; 0: no limit")
    requests_per_minute: int = Field(0, ge=0, description="requests of one key; 0: no limit")
    tokens_per_minute: int = Field(0, ge=0, description="prompt and generated tokens of one key; 0: no limit")


def _as_tuple(value: object) -> object:
    """One string may be several words with commas between: an environment variable has no other form."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class ServerConfig(Section):
    """The HTTP front end."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port; 0: any free one")
    api_key: Words = Field(
        (),
        repr=False,
        description="one of these is required as Bearer token when any is set; better given as "
        "OSTINATO_API_KEY, with commas between",
    )
    api_key_file: str = Field("", description="TOML file of named API keys with limits, see docs/security.md")
    admin_key: str = Field(
        "",
        repr=False,
        description="Bearer token of the /admin routes, which do not exist without; better given as "
        "OSTINATO_ADMIN_KEY",
    )
    limits: LimitsConfig = LimitsConfig()
    cors_origins: Words = Field(
        (), description="web origins whose pages may use the API, like https://chat.example.com; * for any"
    )
    served_name: str = Field("", description="model name that clients use; empty: the artifact's own")
    max_body_mib: float = Field(32.0, gt=0, allow_inf_nan=False, description="largest request body, MiB")
    max_bodies_mib: float = Field(
        512.0, gt=0, allow_inf_nan=False, description="request bodies held in memory at once, MiB"
    )
    max_connections: int = Field(8192, ge=1, le=1_000_000, description="open connections; further get 503")
    header_timeout_s: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="seconds for a request's head to arrive whole"
    )
    body_timeout_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="seconds for a request's body to arrive whole"
    )
    send_timeout_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="seconds that a client may read nothing of its answer"
    )
    keepalive_s: float = Field(
        75.0, gt=0, allow_inf_nan=False, description="seconds that a connection may idle between requests"
    )
    request_timeout_s: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="most seconds of one generation; 0: no limit"
    )
    template_timeout_s: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="most seconds that the chat template may take"
    )
    access_log: Literal["off", "text", "json"] = Field(
        "off", description="one line per request on stderr, at most 1000 a second"
    )
    trace_endpoint: str = Field(
        "",
        description="OTLP/HTTP collector for OpenTelemetry traces, like http://localhost:4318; empty: none",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get to finish on shutdown")
    stall_s: float = Field(30.0, gt=0, description="seconds without step progress before /health fails")
    chat_template: str = Field(
        "",
        description="file with a Jinja chat template in place of the model's, such as one that shows tools: "
        "a program, so trust it like one; empty: the model's own",
    )
    allow_chat_template: bool = Field(
        False, description="requests may bring a chat template: a program, run apart with little memory"
    )
    store_mib: float = Field(
        256.0, ge=0, allow_inf_nan=False, description="stored responses (/v1/responses), MiB; 0: none"
    )
    store_ttl_s: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="seconds that a stored response can be asked for"
    )
    max_n: int = Field(16, ge=1, le=128, description="most choices (`n`) of one request")
    tool_parser: str = Field(
        "auto", description="how the model writes tool calls, see docs/api.md; auto: by its chat template"
    )
    reasoning_parser: str = Field(
        "auto", description="how the model marks its thoughts, see docs/api.md; auto: by its chat template"
    )
    reasoning_start_str: str = Field(
        "", description="text that begins thoughts, for thinking budgets; empty: the reasoning parser's own"
    )
    reasoning_end_str: str = Field(
        "",
        description="text that ends thoughts whose budget is spent, such as a sentence that closes with "
        "</think>; empty: the reasoning parser's end mark alone",
    )
    max_logprobs: int = Field(20, ge=0, le=1000, description="most alternatives per token")


def _upper(name: object) -> object:
    return name.upper() if isinstance(name, str) else name


LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)]


class EngineConfig(Section):
    """All settings; the one object that `compile-model`, the server and `LLM` take."""

    graph: GraphConfig = GraphConfig()
    passes: PassesConfig = PassesConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cpu: CpuConfig = CpuConfig()
    gpu: GpuConfig = GpuConfig()
    profile: ProfileConfig = ProfileConfig()
    server: ServerConfig = ServerConfig()
    max_model_len: int = Field(0, ge=0, description="context window in tokens; 0: the model's own")
    log_level: LogLevel = Field("INFO", description="least level that is logged, in either case")


SECRETS = {"server.api_key": "OSTINATO_API_KEY", "server.admin_key": "OSTINATO_ADMIN_KEY"}
"""Settings that are never shown, and the environment variables that give them out of sight of `ps`."""


def without_secrets(config: EngineConfig) -> EngineConfig:
    """A copy for those who need no keys, or show what they are given: a key that is set becomes `***`."""
    server = config.server
    hidden = {"api_key": ("***",) * bool(server.api_key), "admin_key": "***" if server.admin_key else ""}
    return config.model_copy(update={"server": server.model_copy(update=hidden)})


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
        said = first["msg"]
        if first["type"] == "extra_forbidden":
            said = f"no such setting; known here: {', '.join(_names(first['loc'][:-1]))}"
        raise ConfigError(f"{path}={_shown(path, first['input'])}: {said}; {hint}") from None


def _names(path: tuple[int | str, ...]) -> list[str]:
    """The settings of a section."""
    section: Any = EngineConfig
    for name in path:
        section = section.model_fields[name].annotation
    return sorted(section.model_fields)


def _shown(path: str, given: object) -> str:
    """What an error may repeat of a wrong setting: no key, and no table, since one may hold keys."""
    if any(path == secret or path.startswith(f"{secret}.") for secret in SECRETS):
        return "***"
    return "a table" if isinstance(given, Mapping) else repr(given)
