"""The requests of Anthropic's Messages API, as strict as those of the other routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.sampling_schema import MAX_STOPS, StopText
from ostinato.runtime.http.shared_sampling import SharedSampling, TemplateFields
from ostinato.runtime.http.wire import STRICT, Whole, optional, required

IGNORED = frozenset(
    {"cache_control", "diagnostics", "inference_geo", "metadata", "user_profile_id", "workspace_id"}
)
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (),
    # to keep all thoughts: nothing is ever cleared
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}


class _Part(BaseModel):
    """A part of a request. `cache_control` is accepted everywhere: prefixes are always cached here."""

    model_config = STRICT

    cache_control: dict[str, Any] | None = None  # Any: not looked at


class TextBlock(_Part):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None  # Any: those of an earlier answer; not shown to the template


class OnlyText(TextBlock):
    """Text where no other block can stand."""

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, block: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind != "text":
            said = f"{kind[:40]!r} blocks are not supported here; give text"
            raise PydanticCustomError("not_text", "{said}", {"at": "type", "said": said})
        return block


class ThinkingBlock(_Part):
    """Thoughts of an earlier answer; the signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Part):
    """Thoughts that nobody can read; dropped."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Part):
    """A past call."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]  # Any: the tool's own business
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(_Part):
    """What a tool said. Whether it was an error is for the text to say: templates have no word for it."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: ResultContent | None = None
    is_error: bool | None = None
    toolset_name: None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return f"#{kind}" if kind in _BLOCKS else "#unknown"


def _no_such_block(value: Any) -> Any:  # Any: what pydantic hands to every "before" validator
    said = f"{value['type'][:40]!r} blocks are not supported; this server reads {', '.join(_BLOCKS)}"
    raise PydanticCustomError("unknown_block", "{said}", {"at": "type", "said": said})


def _text_or_blocks(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#blocks" if isinstance(value, list) else None


Block = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")]
    | Annotated[TextBlock, BeforeValidator(_no_such_block), Tag("#unknown")],
    Discriminator(
        _block_kind,
        custom_error_type="block_kind",
        custom_error_message="must be an object with a type",
    ),
]
_SAYS_TEXT_OR_BLOCKS = {
    "custom_error_type": "content_kind",
    "custom_error_message": "must be a string or a list of blocks",
}
ResultContent = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[OnlyText], Field(fail_fast=True), Tag("#blocks")],
    Discriminator(_text_or_blocks, **_SAYS_TEXT_OR_BLOCKS),
]
Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[Block], Field(fail_fast=True), Tag("#blocks")],
    Discriminator(_text_or_blocks, **_SAYS_TEXT_OR_BLOCKS),
]


class Message(BaseModel):
    """One turn. A message of an earlier answer may be sent back as role and content."""

    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _blocks_fit_role(self) -> Message:
        for at, block in enumerate(self.content if isinstance(self.content, list) else ()):
            wanted = {"tool_result": ("user",), "text": ("user", "assistant", "system")}.get(
                block.type, ("assistant",)
            )
            if self.role not in wanted:
                said = f"{block.type!r} blocks belong to role {wanted[0]!r}"
                raise PydanticCustomError("wrong_role", "{said}", {"at": f"content[{at}].type", "said": said})
        return self


class Tool(_Part):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    input_schema: dict[str, Any]  # Any: JSON Schema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None  # this and the next three are hints; not shown to the template
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, tool: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            said = f"{kind[:40]!r} tools are not supported: this server runs no tools; give 'custom' ones"
            raise PydanticCustomError("server_tool", "{said}", {"at": "type", "said": said})
        return tool


class ToolChoice(BaseModel):
    """Whether the model calls tools."""

    model_config = STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _tool_has_a_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError(
                "choice_name", "goes with type 'tool', and only with it", {"at": "name"}
            )
        return self


class Thinking(BaseModel):
    """Whether the model thinks first, and how long."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Whole, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget_belongs_to_enabled(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise PydanticCustomError("budget", "goes with type 'enabled'", {"at": "budget_tokens"})
        return self


class OutputFormat(BaseModel):
    """A JSON schema that the answer must match."""

    model_config = STRICT

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]  # Any: JSON Schema


class OutputConfig(BaseModel):
    """How the answer is made."""

    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptRequest(TemplateFields):
    """What a prompt is made of; alone it is POST /v1/messages/count_tokens."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] = required(
        "at least one. Turns of one role in a row are one turn. If the last is the assistant's, the answer "
        "goes on where it ends. Blocks: `text`, `thinking`, `redacted_thinking` (dropped), `tool_use`, "
        "`tool_result`; others are refused by their type"
    )
    system: ResultContent | None = optional("a string or text blocks")
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = optional(
        "tools that the client runs (`type` left out or `custom`); tools of Anthropic's servers are refused"
    )
    tool_choice: ToolChoice | None = optional(
        "`auto`, `any`, `tool` with a `name`, `none`. `disable_parallel_tool_use`: the answer ends behind "
        "its first call",
        "auto",
    )
    thinking: Thinking | None = optional(
        "`enabled`, with `budget_tokens` (see *Thinking budget*) or without a limit, `disabled`, or "
        "`adaptive`: as the template does by itself. On and off are the `reasoning_effort` of "
        "/v1/chat/completions, medium and none",
        "as the template does by itself",
    )
    output_config: OutputConfig | None = optional(
        "`effort`: the `reasoning_effort` of /v1/chat/completions. `format`: a JSON schema for the answer"
    )


class MessagesRequest(PromptRequest, SharedSampling):
    """POST /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1)] = required(
        "1 or more. An upper bound: it is cut to what the window leaves"
    )
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = optional(
        f"up to {MAX_STOPS}, with the rules of `stop` of /v1/chat/completions"
    )
    stream: bool | None = optional("server-sent events", "false")


class CountRequest(PromptRequest):
    """POST /v1/messages/count_tokens."""
