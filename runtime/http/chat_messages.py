"""Messages of a chat request, and what the chat template gets to see of them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.errors import InvalidRequest
from ostinato.runtime.chat_roles import Role, role_fault
from ostinato.runtime.chat_template import prints_any_arguments
from ostinato.runtime.http.strict_json import parse

_READS_REASONING = re.compile(r"""(\.|\[['"]|get\(['"])reasoning\b""")
_READS_THINKING = re.compile(r"""(message\.|message\[['"]|message\.get\(['"])thinking\b""")
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class TextPart(BaseModel):
    """One part of a message whose content is a list. Only text can be read."""

    model_config = _STRICT

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
            raise PydanticCustomError(
                "not_text",
                f"{kind[:40]!r} parts are not supported: this server reads text only",
                {"at": "type"},
            )
        return part


class FunctionCall(BaseModel):
    """The function of a past tool call; `arguments` is JSON text of an object, or what a model made of it."""

    model_config = _STRICT

    name: str
    arguments: str
    parsed_arguments: Any = None  # Any: what the client library makes of the text; not looked at


class ToolCall(BaseModel):
    """A past call, replayed in an assistant message."""

    model_config = _STRICT

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


def _content_kind(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("#parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_kind",
        custom_error_message="must be a string or a list of text parts",
    ),
]


def _known_role(role: object) -> object:
    if fault := role_fault(role):
        raise PydanticCustomError("unknown_role", "{fault}", {"fault": fault})
    return role


class ChatMessage(BaseModel):
    """One message. A message of an earlier answer may be sent back as the client library dumps it."""

    model_config = _STRICT

    role: Annotated[Role, BeforeValidator(_known_role)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  # this and the next four come with dumped answers; not shown to the template
    parsed: Any = None  # Any: this and the next are not looked at
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _role_fits_fields(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":  # what some libraries make of an empty answer
            raise PydanticCustomError("no_content", f"is required for role {self.role!r}", {"at": "content"})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("wrong_role", "belongs to role 'assistant' only", {"at": "tool_calls"})
        if self.tool_call_id is not None and self.role != "tool":
            raise PydanticCustomError("wrong_role", "belongs to role 'tool' only", {"at": "tool_call_id"})
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


def template_messages(messages: list[ChatMessage], template: str) -> list[dict[str, object]]:
    """Plain dicts for the chat template.

    Arguments of tool calls are decoded, since templates print mappings themselves.  Text that is no JSON
    object stays text, for a model may have written it; where `template` cannot print that it raises
    InvalidRequest, as do tool calls that `template` never reads.  Thoughts are given under
    every name that `template` reads.  `developer` becomes `system` for one that does not know the word.
    """
    knows_developer, knows_calls = "developer" in template, "tool_calls" in template
    result = []
    for at, message in enumerate(messages):
        role = "system" if message.role == "developer" and not knows_developer else message.role
        shown: dict[str, object] = {"role": role, "content": _content(message)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                shown[name] = value
        if (thought := message.reasoning_content or message.reasoning) is not None:
            shown |= dict.fromkeys(_thought_names(template, has_content=bool(message.content)), thought)
        if message.tool_calls:
            if not knows_calls:
                param = f"messages[{at}].tool_calls"
                raise InvalidRequest(
                    f"{param}: this model's chat template cannot show tool calls", param=param
                )
            shown["tool_calls"] = [
                _call(call, f"messages[{at}].tool_calls[{which}].function.arguments", template)
                for which, call in enumerate(message.tool_calls)
            ]
        result.append(shown)
    return result


def _thought_names(template: str, *, has_content: bool) -> list[str]:
    """What this template may call the thoughts of a message."""
    names = ["reasoning_content"]
    if _READS_REASONING.search(template):
        names.append("reasoning")
    # gpt-oss's template refuses a message with both; there the content of a call is a thought anyway.
    if _READS_THINKING.search(template) and not has_content:
        names.append("thinking")
    return names


def _content(message: ChatMessage) -> object:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return [{"type": part.type, "text": part.text} for part in message.content]


def _call(call: ToolCall, param: str, template: str) -> dict[str, object]:
    text = call.function.arguments
    arguments: object = {}
    try:
        if text.strip() and not isinstance(arguments := parse(text, param, param=param), dict):
            raise InvalidRequest(f"{param}: must be the JSON text of an object", param=param)
    except InvalidRequest:
        if not prints_any_arguments(template):
            raise
        arguments = text
    shown: dict[str, object] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
    return shown if call.id is None else {"id": call.id, **shown}
