"""From a validated request to what the engine is asked: defaults, limits of server and model, clamping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.api_errors import refusal
from ostinato.runtime.http.api_schema import SamplingRequest, Wire
from ostinato.runtime.http.request_body import read_body
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.http.strict_json import parse_object
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.prompt_room import room_left

W = TypeVar("W", bound=Wire)

MAX_CHOICES = 1024  # sequences of one request: prompts times n
_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logit_bias",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


async def read_request(request: web.Request, schema: type[W]) -> W:
    """The validated body; see `read_body` for its limits."""
    body = await read_body(request)
    try:
        fields = schema.model_validate(parse_object(body))
    except ValidationError as error:
        raise refusal(error) from None
    request.app[STATE].check_model(fields.model)
    return fields


def sampling_params(
    state: ServerState, fields: SamplingRequest, *, limit: int | None, logprobs: int | None
) -> SamplingParams:
    """All that does not depend on the prompt; `fit` adds the rest.

    `limit` is the request's own max_tokens.
    """
    info, config = state.engine.info, state.config
    if (fields.n or 1) > config.max_n:
        raise InvalidRequest(f"n: at most {config.max_n} on this server; got {fields.n}", param="n")
    if logprobs is not None and logprobs > config.max_logprobs:
        param = "top_logprobs" if hasattr(fields, "top_logprobs") else "logprobs"
        raise InvalidRequest(f"{param}: at most {config.max_logprobs}; got {logprobs}", param=param)
    if limit is not None and (fields.min_tokens or 0) > limit:
        raise InvalidRequest(
            f"min_tokens: {fields.min_tokens} is over max_tokens={limit}", param="min_tokens"
        )
    check_tokens(fields.logit_bias or (), info.vocab_size, "logit_bias")
    check_tokens(fields.stop_token_ids or (), info.vocab_size, "stop_token_ids")
    values: dict[str, Any] = state.text.defaults.model_dump(exclude_none=True)
    values |= {name: value for name in _COPIED if (value := getattr(fields, name)) is not None}
    return SamplingParams(
        **values,  # the schema has checked the types
        max_tokens=limit,
        seed=None if fields.seed is None else fields.seed % 2**63,
        stop=fields.stops,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logprobs=logprobs,
    )


def fit(sampling: SamplingParams, prompt_ids: Sequence[int], window: int, *, param: str) -> SamplingParams:
    """Cut `max_tokens` to the room behind this prompt. ContextTooLong when there is none."""
    room = room_left(len(prompt_ids), window, param=param)
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return sampling.model_copy(update={"max_tokens": limit})


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """A prompt has at least one token, and only tokens of this model."""
    if not prompt_ids:
        raise InvalidRequest(f"{param}: the prompt is empty; it must have at least one token", param=param)
    check_tokens(prompt_ids, vocab_size, param)


def check_tokens(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Every id must be below the vocabulary size."""
    largest = max(ids, default=-1)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{param}: token id {largest} is outside the vocabulary of {vocab_size} tokens", param=param
        )
