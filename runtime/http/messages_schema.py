"""The requests of Anthropic's Messages API, as strict as those of the other routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.api_schema import MAX_STOPS, LogitBias, StopText, TokenId, Whole, Wire
from ostinato.runtime.http.known_fields import keep_known

IGNORED = frozenset(
    {"cache_control", "diagnostics", "inference_geo", "metadata", "user_profile_id", "workspace_id"}
)
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


class _Part(BaseModel):
    """A part of a request. `cache_control` is accepted everywhere: prefixes are always cached here."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
    if kind not in _BLOCKS:
        said = f"{kind[:40]!r} blocks are not supported; this server reads {', '.join(_BLOCKS)}"
        raise PydanticCustomError("unknown_block", "{said}", {"at": "type", "said": said})
    return f"#{kind}"


def _text_or_blocks(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#blocks" if isinstance(value, list) else None


Block = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")],
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

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]  # Any: JSON Schema


class OutputConfig(BaseModel):
    """How the answer is made."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptRequest(Wire):
    """What a prompt is made of; alone it is POST /v1/messages/count_tokens."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: ResultContent | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: the template's own business

    @model_validator(mode="before")
    @classmethod
    def _known_elsewhere(cls, fields: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        """Drop what asks for nothing, refuse by name what we cannot do."""
        return keep_known(fields, known=cls.model_fields, ignored=IGNORED, unsupported=UNSUPPORTED)


class MessagesRequest(PromptRequest):
    """POST /v1/messages. Fields from `min_p` on are ours, with the rules of /v1/chat/completions."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: LogitBias | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None


class CountRequest(PromptRequest):
    """POST /v1/messages/count_tokens."""
