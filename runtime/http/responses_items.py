"""Items of the Responses API: what a conversation is made of there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.wire import STRICT

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(BaseModel):
    """Text of a message; `output_text` comes with sent-back answers."""

    model_config = STRICT

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None  # Any: this and the next two come with answers; not looked at
    logprobs: list[Any] | None = None
    parsed: Any = Field(None, exclude=True)  # what the client library makes of the text
    prompt_cache_breakpoint: dict[str, Any] | None = None  # Any: prefixes are always cached here


class RefusalPart(BaseModel):
    """A refusal of an earlier answer."""

    model_config = STRICT

    type: Literal["refusal"]
    refusal: str


_TEXT_KINDS = ("input_text", "output_text", "text")


def _part_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "refusal":
        return "#refusal"
    return "#text" if not isinstance(kind, str) or kind in _TEXT_KINDS else "#unknown"


def _no_such_part(value: Any) -> Any:  # Any: what pydantic hands to every "before" validator
    said = f"{value['type'][:40]!r} parts are not supported: this server reads text only"
    raise PydanticCustomError("not_text", "{said}", {"at": "type", "said": said})


Part = Annotated[
    Annotated[TextPart, Tag("#text")]
    | Annotated[RefusalPart, Tag("#refusal")]
    | Annotated[TextPart, BeforeValidator(_no_such_part), Tag("#unknown")],
    Discriminator(_part_kind),
]


def _text_or_parts(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[Part], Field(fail_fast=True), Tag("#parts")],
    Discriminator(
        _text_or_parts,
        custom_error_type="content_kind",
        custom_error_message="must be a string or a list of text parts",
    ),
]


class MessageItem(BaseModel):
    """A message, the client's or one of an earlier answer."""

    model_config = STRICT

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # not shown to the template


class FunctionCallItem(BaseModel):
    """A past call; `arguments` is JSON text of an object, or what a model made of it."""

    model_config = STRICT

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    parsed_arguments: Any = Field(None, exclude=True)  # Any: what the client library makes of the text
    id: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None  # Any: not looked at
    namespace: None = None
    async_: bool | None = Field(None, validation_alias=AliasChoices("async", "async_"), exclude=True)


class CallOutputItem(BaseModel):
    """What a function said."""

    model_config = STRICT

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: dict[str, Any] | None = None  # Any: not looked at
    namespace: None = None


class ThoughtPart(BaseModel):
    """One piece of reasoning."""

    model_config = STRICT

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(BaseModel):
    """Thoughts of an earlier answer. What is encrypted elsewhere cannot be read and counts as nothing."""

    model_config = STRICT

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtPart], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The thoughts themselves, or what the summary says of them."""
        return "\n".join(part.text for part in self.content or self.summary)


class ItemReference(BaseModel):
    """An item of a stored response, by its id."""

    model_config = STRICT

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1)]


Item = MessageItem | FunctionCallItem | CallOutputItem | ReasoningItem | ItemReference
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _item_kind(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        # OpenAI takes references and messages without a type.
        return "#message" if "role" in value or "content" in value else "#item_reference"
    return f"#{kind}" if isinstance(kind, str) and kind in _KINDS else "#unknown"


def _no_such_item(value: Any) -> Any:  # Any: what pydantic hands to every "before" validator
    said = f"{value['type']!r:.50} items are not supported; this server reads {', '.join(_KINDS)}"
    raise PydanticCustomError("unknown_item", "{said}", {"at": "type", "said": said})


InputItem = Annotated[
    Annotated[MessageItem, Tag("#message")]
    | Annotated[FunctionCallItem, Tag("#function_call")]
    | Annotated[CallOutputItem, Tag("#function_call_output")]
    | Annotated[ReasoningItem, Tag("#reasoning")]
    | Annotated[ItemReference, Tag("#item_reference")]
    | Annotated[ItemReference, BeforeValidator(_no_such_item), Tag("#unknown")],
    Discriminator(
        _item_kind, custom_error_type="item_kind", custom_error_message="must be an object: a message or item"
    ),
]
ITEM: TypeAdapter[Item] = TypeAdapter(InputItem)


class Tool(BaseModel):
    """A function that the client runs."""

    model_config = STRICT

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: JSON Schema
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None  # this and the next two are hints; not shown to the template
    allowed_callers: list[Any] | None = None
    defer_loading: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, tool: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            said = f"{kind[:40]!r} tools are not supported: this server runs no tools; give 'function' ones"
            raise PydanticCustomError("hosted_tool", "{said}", {"at": "type", "said": said})
        return tool
