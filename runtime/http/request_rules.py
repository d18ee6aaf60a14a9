"""From a validated request to what the engine is asked: defaults, limits of server and model, clamping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from ostinato.errors import InvalidRequest
from ostinato.runtime.bad_words import with_word_ids
from ostinato.runtime.grammar.grammar_spec import read_grammar
from ostinato.runtime.http.answer_parts import new_id
from ostinato.runtime.http.api_errors import refusal
from ostinato.runtime.http.api_schema import SamplingRequest, TemplateRequest, Wire
from ostinato.runtime.http.grammar_schema import grammar_params
from ostinato.runtime.http.request_body import read_body
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.http.strict_json import parse_object
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.prompt_room import room_left
from ostinato.runtime.request_check import check_task
from ostinato.runtime.sampling.sampling_check import validate_sampling

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
    "thinking_token_budget",
)


async def read_request(request: web.Request, schema: type[W]) -> W:
    """The validated body; see `read_body` for its limits."""
    body = await read_body(request)
    try:
        fields = schema.model_validate(parse_object(body))
    except ValidationError as error:
        raise refusal(error) from None
    state = request.app[STATE]
    state.check_model(fields.model)
    if schema.task is not None:
        check_task(schema.task, state.engine.info)
    return fields


def sampling_params(
    state: ServerState, fields: SamplingRequest, *, limit: int | None, logprobs: int | None
) -> SamplingParams:
    """All that does not depend on the prompt; `fit` adds the rest.

    `limit` is the request's own max_tokens.
    """
    info, config = state.engine.info, state.config
    if fields.sequences > config.max_n:
        param = "n" if fields.sequences == fields.n else "best_of"
        raise InvalidRequest(
            f"{param}: at most {config.max_n} on this server; got {fields.sequences}", param=param
        )
    named = "top_logprobs" if hasattr(fields, "top_logprobs") else "logprobs"
    for param, asked in ((named, logprobs), ("prompt_logprobs", fields.prompt_logprobs)):
        if asked is not None and asked > config.max_logprobs:
            raise InvalidRequest(f"{param}: at most {config.max_logprobs}; got {asked}", param=param)
    if limit is not None and (fields.min_tokens or 0) > limit:
        raise InvalidRequest(
            f"min_tokens: {fields.min_tokens} is over max_tokens={limit}", param="min_tokens"
        )
    for param in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_tokens(getattr(fields, param) or (), info.vocab_size, param)
    values: dict[str, Any] = state.text.defaults.model_dump(exclude_none=True)
    values |= {name: value for name in _COPIED if (value := getattr(fields, name)) is not None}
    allowed = fields.allowed_token_ids
    sampling = SamplingParams(
        **values,  # the schema has checked the types
        max_tokens=limit,
        seed=None if fields.seed is None else fields.seed % 2**63,
        stop=fields.stops,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(fields.bad_words or ()),
        logprobs=logprobs,
        logprob_token_ids=tuple(fields.logprob_token_ids or ()),
        prompt_logprobs=fields.prompt_logprobs,
        **grammar_params(fields),
    )
    read_grammar(sampling)  # what can be seen without compiling, its size for one
    sampling = with_word_ids(state.text, sampling)
    validate_sampling(sampling, info.vocab_size)
    return sampling


def answer_id(state: ServerState, prefix: str, request_id: str | None) -> str:
    """The id of an answer; InvalidRequest if the client's own is in use."""
    if request_id is None:
        return new_id(prefix)
    name = f"{prefix}-{request_id}"
    if f"{name}-0" in state.live:
        raise InvalidRequest(
            f"request_id: {request_id!r} is the id of a request that is running; give another",
            param="request_id",
        )
    return name


def check_template(state: ServerState, fields: TemplateRequest) -> None:
    """A template of the request's own runs only where the operator allows it."""
    if fields.chat_template is not None and not state.config.allow_chat_template:
        raise InvalidRequest(
            "chat_template: not allowed on this server (server.allow_chat_template); leave it out",
            param="chat_template",
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
