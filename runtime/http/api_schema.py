"""The requests of the HTTP interface: one strict model per route. Each field says its own rule (docs/api.md).

What all have in common is in `wire.py`, what both completion routes have in `sampling_schema.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.runtime.config import MAX_PROFILE_S
from ostinato.runtime.http.chat_messages import ChatMessage
from ostinato.runtime.http.prompt_schema import BY_KIND, IdList, Ids, Text
from ostinato.runtime.http.sampling_schema import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOPS,
    LogitBias,
    SamplingRequest,
    Stop,
    StopText,
    StreamOptions,
)
from ostinato.runtime.http.tool_schema import ToolRequest, ToolTemplateRequest
from ostinato.runtime.http.wire import IGNORED, UNSUPPORTED, TokenId, Whole, Wire, optional, required

__all__ = [
    "IGNORED",
    "MAX_BAD_WORDS",
    "MAX_LOGIT_BIAS",
    "MAX_PROMPTS",
    "MAX_STOPS",
    "UNSUPPORTED",
    "AbortRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "KVTargetRequest",
    "LogitBias",
    "ResetPrefixRequest",
    "SamplingRequest",
    "SleepRequest",
    "StartProfileRequest",
    "Stop",
    "StopProfileRequest",
    "StopText",
    "StreamOptions",
    "TemplateRequest",
    "TokenId",
    "TokenizeRequest",
    "WakeRequest",
    "Whole",
    "Wire",
]

MAX_PROMPTS = 1024
MAX_ABORTED = 4096  # names of one POST /admin/abort
RequestName = Annotated[str, Field(min_length=1, max_length=256)]
MAX_TEMPLATE = 65_536  # characters of a chat template that a request brings


Prompt = Annotated[
    Text
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("#texts")]
    | Ids
    | Annotated[list[IdList], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("#id_lists")],
    BY_KIND,
]


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompt = required(
        f"a string, a list of strings, of token ids, or of lists of token ids; at most {MAX_PROMPTS} "
        "prompts. Empty prompts and ids outside the vocabulary are refused. Choices of prompt p are `p * n` "
        "to `p * n + n - 1`"
    )
    max_tokens: Annotated[Whole, Field(ge=0)] | None = optional(
        "as above. 0 with `echo` gives the prompt alone; without it 0 is refused", "16, or `min_tokens`"
    )
    echo: bool | None = optional(
        "the prompt in front of the text; with `logprobs` its tokens too (the first has null)", "false"
    )
    logprobs: Annotated[Whole, Field(ge=0)] | None = optional(
        "0 to `server.max_logprobs` alternatives; the chosen token is always among `top_logprobs`. An EOS or "
        "stop token that ends the text is listed too, though the text does not have it"
    )
    best_of: Annotated[Whole, Field(ge=1, le=128)] | None = optional(
        "`n` to `server.max_n`: so many are generated, and the `n` of the highest mean log-probability per "
        "token come back, best first; all count in `usage`. More than `n` cannot be streamed",
        "`n`",
    )

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise PydanticCustomError("too_few", f"must be n={self.n or 1} or more", {"at": "best_of"})
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise PydanticCustomError(
                "no_stream", "must equal n in a stream: the best are known at the end", {"at": "best_of"}
            )
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("needs_echo", "must be 1 or more without echo", {"at": "max_tokens"})
        if self.logprob_token_ids is not None and self.logprobs != 0:
            raise PydanticCustomError("needs_logprobs", "needs logprobs=0", {"at": "logprob_token_ids"})
        return self

    @property
    def sequences(self) -> int:
        """Sequences to generate for each prompt."""
        return self.best_of or self.n or 1


class TemplateRequest(Wire):
    """What a chat template is given besides the messages."""

    add_generation_prompt: bool | None = optional(
        "let the template write the beginning of an answer", "true, unless `continue_final_message`"
    )
    continue_final_message: bool | None = optional(
        "the answer goes on where the last message ends, which must be the assistant's and have text; not "
        "with `add_generation_prompt`: true. The text that is there already is not repeated",
        "false",
    )
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = optional(
        f"Jinja of up to {MAX_TEMPLATE} characters, in place of the model's. Refused unless "
        "`server.allow_chat_template`: a template is a program. It runs in a process of its own, with 512 "
        "MiB and `server.template_timeout_s` seconds",
        "the model's",
    )
    chat_template_kwargs: dict[str, Any] | None = optional(  # Any: the template's own business
        'further variables of the template, for example `{"enable_thinking": false}`; not those that the '
        "server sets itself"
    )
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = optional(
        "objects for the template, usually with `title` and `text`. A template that never reads them gets a "
        "400"
    )

    @model_validator(mode="after")
    def _template_fields_agree(self) -> TemplateRequest:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise PydanticCustomError(
                "both", "contradicts add_generation_prompt=true; give one", {"at": "continue_final_message"}
            )
        messages: list[ChatMessage] = getattr(self, "messages", None) or []
        if not messages or messages[-1].role != "assistant" or not messages[-1].content:
            raise PydanticCustomError(
                "nothing_to_continue",
                "needs a last message of role assistant with text",
                {"at": "continue_final_message"},
            )
        return self


class ChatRequest(SamplingRequest, TemplateRequest, ToolRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = required(
        "at least one. Roles: system, developer, user, assistant, tool"
    )
    echo: bool | None = optional(
        "needs `continue_final_message`: the text of that message, as it was sent, stands in front of the "
        "answer (parts are joined by newlines); in a stream it is the first text of each choice. "
        "Log-probabilities, token ids and usage are those of the answer alone",
        "false",
    )
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = optional(
        "the same as `max_tokens`; both may be given if equal"
    )
    logprobs: bool | None = optional("a boolean", "false")
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = optional(
        "needs `logprobs`; 0 to `server.max_logprobs`", "0"
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("needs_logprobs", "needs logprobs=true", {"at": "top_logprobs"})
        if self.logprob_token_ids is not None and (not self.logprobs or self.top_logprobs):
            raise PydanticCustomError(
                "needs_logprobs", "needs logprobs=true and no top_logprobs", {"at": "logprob_token_ids"}
            )
        if self.echo and not self.continue_final_message:
            raise PydanticCustomError("needs_continue", "needs continue_final_message=true", {"at": "echo"})
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
    def echoed(self) -> str:
        """The text in front of the answer."""
        return self.messages[-1].text if self.echo else ""

    @property
    def token_limit(self) -> int | None:
        """`max_tokens` by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(TemplateRequest, ToolTemplateRequest):
    """POST /tokenize: a prompt or messages, by the rules of the two completion routes."""

    prompt: str | None = optional("text, as in /v1/completions; this or `messages`")
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = optional(
        "as in /v1/chat/completions"
    )
    add_special_tokens: bool | None = optional(
        "let the tokenizer add BOS", "true for `prompt`, false for `messages`"
    )
    return_token_strs: bool | None = optional("`token_strs` besides `tokens`", "false")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of_two", "give either prompt or messages", {"at": "prompt"})
        return self


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = required("token ids")


class SleepRequest(Wire):
    """POST /admin/sleep."""

    level: Annotated[Whole, Field(ge=1, le=2)] = required(
        "1: weights are kept in host memory; 2: they are read again"
    )


class WakeRequest(Wire):
    """POST /admin/wake: nothing to say."""


class KVTargetRequest(Wire):
    """POST /admin/kv. The field must be there: an empty object is more likely a mistake than a wish."""

    target_bytes: Annotated[Whole, Field(ge=0, le=2**63 - 1)] | None = required(
        "at most so many bytes of KV memory; null: what the settings allow"
    )


class ResetPrefixRequest(Wire):
    """POST /admin/reset_prefix_cache: nothing to say."""


class AbortRequest(Wire):
    """POST /admin/abort. Which requests must be said: an empty object is more likely a mistake."""

    request_ids: Annotated[list[RequestName], Field(min_length=1, max_length=MAX_ABORTED)] | None = optional(
        "ids of answers, or `X-Request-Id` of their HTTP requests"
    )
    all: Literal[True] | None = optional("true: all requests; not with `request_ids`")

    @model_validator(mode="after")
    def _one_of_both(self) -> AbortRequest:
        if (self.request_ids is None) == (self.all is None):
            raise PydanticCustomError(
                "one_of_both", "give either request_ids or all: true", {"at": "request_ids"}
            )
        return self


class StartProfileRequest(Wire):
    """POST /admin/profile/start. Where the trace goes is a setting, never a field."""

    seconds: Annotated[float, Field(gt=0, le=MAX_PROFILE_S, allow_inf_nan=False)] | None = optional(
        "the profile ends by itself after so many; at most `profile.max_seconds`", "`profile.max_seconds`"
    )


class StopProfileRequest(Wire):
    """POST /admin/profile/stop: nothing to say."""
