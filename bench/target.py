"""The server under test and how to talk to it: routes, bodies, headers."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ostinato.bench.load_item import LoadItem
from ostinato.errors import ConfigError
from ostinato.section import Section

BackendName = Literal["openai", "openai-chat", "embeddings", "rerank"]


class TargetSettings(Section):
    """The server under test."""

    url: str = Field("http://127.0.0.1:8000", description="address of the server, with or without /v1")
    backend: BackendName = Field("openai-chat", description="API: completions, chat, embeddings or rerank")
    endpoint: str = Field("", description="path instead of the backend's usual one")
    model: str = Field("", description="model to ask for; empty: the first that /v1/models lists")
    api_key: str = Field("", description="bearer token; better given as OPENAI_API_KEY")
    headers: tuple[str, ...] = Field((), description="more headers, as Name:value")
    extra_body: str = Field("{}", description="JSON object merged into each body; null removes a field")
    stream: bool = Field(True, description="ask for events; without them there is no TTFT")
    ignore_eos: bool = Field(
        True, description="with max_tokens: answers of full length, on servers that know it"
    )
    temperature: float = Field(0.0, ge=0, description="of sampling; 0 is greedy")
    timeout_s: float = Field(3600.0, gt=0, description="a request that takes longer has failed")
    ready_timeout_s: float = Field(60.0, ge=0, description="wait so long for the server; 0: not at all")
    profile_start: str = Field("", description="path that gets a POST before each measured run")
    profile_stop: str = Field("", description="path that gets a POST after it")
    profile_key: str = Field(
        "", description="bearer token of these two; better given as OSTINATO_ADMIN_KEY; empty: as of requests"
    )


class Backend(NamedTuple):
    """One API. `streams`: it can answer in events."""

    path: str
    streams: bool
    entries: str = ""  # where its answer has a list with an entry for each input


BACKENDS: dict[str, Backend] = {
    "openai": Backend("/v1/completions", True),
    "openai-chat": Backend("/v1/chat/completions", True),
    "embeddings": Backend("/v1/embeddings", False, "data"),
    "rerank": Backend("/v1/rerank", False, "results"),
}


def base_of(target: TargetSettings) -> str:
    """Address of the server, without the /v1 that OpenAI's clients are given. ConfigError for no URL."""
    if not target.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {target.url[:80]!r}: must begin with http:// or https://")
    return target.url.rstrip("/").removesuffix("/v1")


def url_of(target: TargetSettings) -> str:
    """Where requests go. An endpoint of the user's own follows the address as it was given."""
    base = base_of(target)
    if target.endpoint:
        return target.url.rstrip("/") + target.endpoint
    return base + BACKENDS[target.backend].path


def streams(target: TargetSettings) -> bool:
    """Whether answers come as events."""
    return target.stream and BACKENDS[target.backend].streams


def headers_of(target: TargetSettings) -> dict[str, str]:
    """Of every request. ConfigError for one that is not `Name:value`."""
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    for given in target.headers:
        name, colon, value = given.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--headers {given!r}: must be Name:value")
        headers[name.strip()] = value.strip()
    return headers


def extra_of(target: TargetSettings) -> dict[str, Any]:
    """The extra body. ConfigError when it is not a JSON object."""
    try:
        extra = json.loads(target.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body {target.extra_body[:80]!r}: not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body {target.extra_body[:80]!r}: must be a JSON object")
    return extra


class BodyMaker:
    """Bodies of requests for one target and model."""

    def __init__(self, target: TargetSettings, model: str) -> None:
        self._target = target
        self._extra = extra_of(target)
        self._model = model

    def body(self, item: LoadItem, turn: int = 0, answers: list[str] | None = None) -> bytes:
        """The body of one turn; `answers` are the server's own of the turns before."""
        made: dict[str, Any] = {"model": self._model}
        backend = self._target.backend
        if backend == "embeddings":
            made["input"] = item.inputs or item.turns
        elif backend == "rerank":
            if item.documents is None:
                raise ConfigError("--backend rerank needs documents: see --dataset rerank")
            made |= {"query": item.turns[0], "documents": item.documents}
        else:
            if backend == "openai":
                made["prompt"] = _as_text(item, turn, answers or [])
            else:
                made["messages"] = _as_messages(item, turn, answers or [])
            made["temperature"] = self._target.temperature
            if item.output_tokens is not None:
                made["max_tokens"] = item.output_tokens
                if self._target.ignore_eos:
                    made["ignore_eos"] = True
            if self._target.stream:
                made |= {"stream": True, "stream_options": {"include_usage": True}}
        made |= self._extra
        return json.dumps({key: value for key, value in made.items() if value is not None}).encode()


def _as_messages(item: LoadItem, turn: int, answers: list[str]) -> list[dict[str, Any]]:
    messages = list(item.messages or ())
    if item.system:
        messages.insert(0, {"role": "system", "content": item.system})
    for at in range(turn):
        messages.append({"role": "user", "content": item.turns[at]})
        messages.append({"role": "assistant", "content": answers[at]})
    return [*messages, {"role": "user", "content": item.turns[turn]}]


def _as_text(item: LoadItem, turn: int, answers: list[str]) -> str:
    parts = [str(message.get("content")) for message in item.messages or ()]
    if item.system:
        parts.insert(0, item.system)
    for at in range(turn):
        parts += [item.turns[at], answers[at]]
    return "\n".join([*parts, item.turns[turn]])
