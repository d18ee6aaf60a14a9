"""The requests of POST /v1/responses and /v1/responses/input_tokens, as strict as those of other routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.responses_items import InputItem, Tool
from ostinato.runtime.http.sampling_schema import Stop
from ostinato.runtime.http.shared_sampling import SharedSampling, TemplateFields
from ostinato.runtime.http.wire import STRICT, Whole, optional, required

IGNORED = frozenset(
    {
        "client_metadata",
        "max_tool_calls",  # counts calls of hosted tools; there are none
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
# What can be included besides that is of hosted tools and images, of which an answer here has none.
LOGPROBS = "message.output_text.logprobs"


class ToolChoice(BaseModel):
    """One function that must be called, or those that may be."""

    model_config = STRICT

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None  # Any: {"type": "function", "name": ...}; checked below

    @model_validator(mode="after")
    def _fields_fit_type(self) -> ToolChoice:
        wanted = ("name",) if self.type == "function" else ("mode", "tools")
        for field in ("name", "mode", "tools"):
            if (getattr(self, field) is not None) != (field in wanted):
                said = f"{'is required' if field in wanted else 'has no place'} in a choice of {self.type!r}"
                raise PydanticCustomError("choice_fields", "{said}", {"at": field, "said": said})
        for at, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                said = 'must be {"type": "function", "name": ...}'
                raise PydanticCustomError("choice_tool", "{said}", {"at": f"tools[{at}]", "said": said})
        return self


def _word_or_choice(value: object) -> str | None:
    return "#word" if isinstance(value, str) else "#choice" if isinstance(value, dict | ToolChoice) else None


class Reasoning(BaseModel):
    """How the model thinks. Where a summary is asked for, the thoughts themselves take its place."""

    model_config = STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class TextFormat(BaseModel):
    """What the text must be."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # Any: JSON Schema
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_goes_with_json_schema(self) -> TextFormat:
        for field, value in (("name", self.name), ("schema", self.json_schema)):
            if (value is not None) != (self.type == "json_schema"):
                said = f"{'has no place' if value is not None else 'is required'} with type {self.type!r}"
                raise PydanticCustomError("format_fields", "{said}", {"at": field, "said": said})
        return self


class TextConfig(BaseModel):
    """How the text is."""

    model_config = STRICT

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(BaseModel):
    """`stream_options`."""

    model_config = STRICT

    include_obfuscation: Literal[False] | None = None


def _text_or_items(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#items" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("#items")],
    Discriminator(
        _text_or_items,
        custom_error_type="input_kind",
        custom_error_message="must be a string or a list of items",
    ),
]
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#word")] | Annotated[ToolChoice, Tag("#choice")],
    Discriminator(
        _word_or_choice,
        custom_error_type="choice_kind",
        custom_error_message="must be none, auto, required, or an object with a type",
    ),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class PromptRequest(TemplateFields):
    """What a prompt is made of, and what the answer may be."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED

    input: Input = required(
        "a string, or items: messages with text, `function_call`, `function_call_output`, `reasoning`, "
        "`item_reference` (to an output item of a stored response); others are refused by their type"
    )
    instructions: str | None = optional(
        "a system message in front of everything; those of an earlier response do not count any more"
    )
    text: TextConfig | None = optional(
        "`format`: `text`, `json_object`, or `json_schema` with `name` and `schema`. `verbosity`: only medium"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = optional(
        "functions; tools that OpenAI's servers run are refused by their type"
    )
    tool_choice: Choice | None = optional(
        '`none`, `auto`, `required`, one function as `{"type": "function", "name": ...}`, or '
        "`allowed_tools`: the model is shown those alone",
        "auto",
    )
    parallel_tool_calls: bool | None = optional("false: the answer ends behind its first call", "true")
    reasoning: Reasoning | None = optional(
        "`effort`: the `reasoning_effort` of /v1/chat/completions. The thoughts are the `content` of "
        "`reasoning` items; with `summary` they stand, unabridged, where a client looks for a summary"
    )
    previous_response_id: str | None = optional("a stored response, whose conversation goes on")


class ResponsesRequest(PromptRequest, SharedSampling):
    """POST /v1/responses."""

    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = optional(
        "1 or more, thoughts included. An upper bound: it is cut to what the window leaves",
        "what the window leaves",
    )
    store: bool | None = optional(
        "keep the response for `server.store_ttl_s`, for GET and `previous_response_id`; see below", "true"
    )
    background: bool | None = optional(
        "answer at once, generate on; needs `store`. The response is asked for with GET, and cancelled "
        "with POST .../cancel",
        "false",
    )
    metadata: Metadata | None = optional(
        "up to 16 pairs, keys of up to 64 and values of up to 512 characters; comes back in the response"
    )
    stream: bool | None = optional("server-sent events", "false")
    stream_options: ResponseStreamOptions | None = optional(
        "needs `stream`. `include_obfuscation`: only false"
    )
    include: list[Included] | None = optional(
        "`message.output_text.logprobs`: tokens of the text with log-probabilities. OpenAI's other values "
        "are accepted: answers here have nothing that they name, and thoughts are never encrypted"
    )
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = optional(
        "0 to `server.max_logprobs`; more than 0 asks for log-probabilities whatever `include` says", "0"
    )
    stop: Stop | None = optional("as in /v1/chat/completions; OpenAI's API has none")
    thinking_token_budget: Annotated[Whole, Field(ge=0)] | None = optional(
        "as in /v1/chat/completions; OpenAI's API has none"
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("needs_stream", "needs stream=true", {"at": "stream_options"})
        if self.background and self.store is False:
            said = "needs store: the answer can be had from the store only"
            raise PydanticCustomError("needs_store", "{said}", {"at": "background", "said": said})
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are listed with their log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


class InputTokensRequest(PromptRequest):
    """POST /v1/responses/input_tokens."""
