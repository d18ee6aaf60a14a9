"""The requests of the HTTP interface: one strict model per route.

Rules for every field (docs/api.md): a type is never guessed (`"2"` and `true` are no integers; `2.0` is one,
as in JSON Schema), `null` means "not given", an unknown field is refused by name.  OpenAI and vLLM fields
that change nothing here are in `IGNORED`; those that would change the answer are in `UNSUPPORTED`, each with
the values that ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.chat_messages import ChatMessage

MAX_STOPS = 32
MAX_PROMPTS = 1024
MAX_LOGIT_BIAS = 1024

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def _whole(value: object) -> object:
    """JSON does not tell 2 from 2.0, so neither do we; the strict check follows."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


def _token_keys(value: object) -> object:
    """JSON keys are strings; token ids are not."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "too_many", f"at most {MAX_LOGIT_BIAS} tokens can have a bias; got {len(value)}"
        )
    result: dict[object, object] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12):
            raise PydanticCustomError(
                "token_key", f'keys must be token ids, as in {{"42": -5}}; got {key!r:.40}'
            )
        if int(key) in result:
            raise PydanticCustomError("token_twice", f"token id {int(key)} is given twice; give it once")
        result[int(key)] = bias
    return result


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "#text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "#texts" if isinstance(first, str) else "#id_lists" if isinstance(first, list) else "#ids"


def _text_or_list(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#texts" if isinstance(value, list) else None


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]], BeforeValidator(_token_keys)
]
Prompt = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("#texts")]
    | Annotated[list[TokenId], Field(fail_fast=True), Tag("#ids")]
    | Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(max_length=MAX_PROMPTS),
        Field(fail_fast=True),
        Tag("#id_lists"),
    ],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_kind",
        custom_error_message="must be a string, a list of token ids, or a non-empty list of either",
    ),
]
Stop = Annotated[
    Annotated[StopText, Tag("#text")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("#texts")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_kind",
        custom_error_message="must be a string or a list of strings",
    ),
]


class Wire(BaseModel):
    """One request body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_elsewhere(cls, fields: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        """Drop what asks for nothing, refuse by name what we cannot do."""
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in UNSUPPORTED:
                if value is not None and value not in UNSUPPORTED[name]:
                    raise PydanticCustomError("unsupported", _unsupported(name), {"at": name})
            elif name not in IGNORED:
                raise PydanticCustomError("unknown_field", "is not a known field", {"at": name})
        return kept


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class SamplingRequest(Wire):
    """What both completion routes take. Ranges are those of `SamplingParams`; a test compares them."""

    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    n: Annotated[Whole, Field(ge=1, le=128)] | None = None
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: LogitBias | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("needs_stream", "needs stream=true", {"at": "stream_options"})
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0)] | None = None
    best_of: Whole | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("unsupported", "must equal n: no ranking is done", {"at": "best_of"})
        return self


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: the template's own business

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("needs_logprobs", "needs logprobs=true", {"at": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise PydanticCustomError(
                "both_limits",
                f"contradicts max_tokens={self.max_tokens}; give one of them",
                {"at": "max_completion_tokens"},
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Wire):
    """POST /tokenize: a prompt or messages, by the rules of the two completion routes."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: the template's own business
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of_two", "give either prompt or messages", {"at": "prompt"})
        return self


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class SleepRequest(Wire):
    """POST /admin/sleep."""

    level: Annotated[Whole, Field(ge=1, le=2)]


class WakeRequest(Wire):
    """POST /admin/wake: nothing to say."""


class KVTargetRequest(Wire):
    """POST /admin/kv. The field must be there: an empty object is more likely a mistake than a wish."""

    target_bytes: Annotated[Whole, Field(ge=0, le=2**63 - 1)] | None


def _unsupported(name: str) -> str:
    accepted = ["null", *(repr(value) for value in UNSUPPORTED[name])]
    return f"is not supported; leave it out or give {' or '.join(accepted)}"
