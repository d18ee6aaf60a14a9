"""Fields of a chat request about tools and thinking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ostinato.runtime.http.wire import STRICT, Wire, optional

MAX_TOOLS = 1024

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class ToolSpec(BaseModel):
    """One of `tools`."""

    model_config = STRICT

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(BaseModel):
    """The function of a named choice."""

    model_config = STRICT

    name: str


class NamedChoice(BaseModel):
    """`tool_choice` of one function."""

    model_config = STRICT

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    """Some of the tools, and whether one of them must be called."""

    model_config = STRICT

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(BaseModel):
    """`tool_choice` of some of the tools."""

    model_config = STRICT

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "#word"
    if not isinstance(value, dict):
        return None
    return "#allowed" if value.get("type") == "allowed_tools" else "#named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#word")]
    | Annotated[NamedChoice, Tag("#named")]
    | Annotated[AllowedChoice, Tag("#allowed")],
    Discriminator(
        _choice_kind,
        custom_error_type="choice_kind",
        custom_error_message="must be none, auto, required, one function as "
        '{"type": "function", "function": {"name": ...}}, or some of the tools as '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    ),
]


class ToolTemplateRequest(Wire):
    """What the template is told of tools and thinking."""

    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = optional(
        f"functions that the model may call, up to {MAX_TOOLS}, names of 1 to 128 letters, digits, `_.-`, "
        "each once. Refused where the chat template does not show tools (`server.chat_template` takes "
        "another) or no tool parser is known for the model (`server.tool_parser`)"
    )
    reasoning_effort: Effort | None = optional(
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`, for the template. One that knows only "
        "a switch (`enable_thinking`, `thinking`) gets it: off for `none`, else on; one that knows neither "
        "gets a 400, unless the answer is `none` and the model does not think"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> ToolTemplateRequest:
        names: set[str] = set()
        for at, tool in enumerate(self.tools or ()):
            if tool.function.name in names:
                raise PydanticCustomError(
                    "name_twice", "is the name of two tools", {"at": f"tools[{at}].function.name"}
                )
            names.add(tool.function.name)
        return self

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names in the order of `tools`."""
        return tuple(tool.function.name for tool in self.tools or ())

    @property
    def shown_tools(self) -> list[ToolSpec]:
        """The tools that the model is told of."""
        return self.tools or []


class ToolRequest(ToolTemplateRequest):
    """What is made of the answer."""

    tool_choice: ToolChoice | None = optional(
        "`none`: tools are shown to the model, calls are not looked for. `auto`: it may call. `required`, or "
        'one function as `{"type": "function", "function": {"name": ...}}`: it must. `{"type": '
        '"allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`: `auto` or `required`, and the '
        "model is shown those tools alone",
        "auto",
    )
    parallel_tool_calls: bool | None = optional("false: the answer ends behind its first call", "true")
    include_reasoning: bool | None = optional("false: thoughts are left out of the answer", "true")

    @model_validator(mode="after")
    def _choice_fits_tools(self) -> ToolRequest:
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise PydanticCustomError("needs_tools", "needs tools", {"at": "tool_choice"})
        named: dict[str, NamedChoice] = {}
        if isinstance(self.tool_choice, NamedChoice):
            named["tool_choice"] = self.tool_choice
        elif isinstance(self.tool_choice, AllowedChoice):
            allowed = enumerate(self.tool_choice.allowed_tools.tools)
            named = {f"tool_choice.allowed_tools.tools[{at}]": one for at, one in allowed}
        for at, one in named.items():
            if one.function.name not in self.tool_names:
                raise PydanticCustomError(
                    "unknown_tool", "is not among the tools", {"at": f"{at}.function.name"}
                )
        return self

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedChoice:
        """`tool_choice` with regard to `shown_tools`."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    @property
    def shown_tools(self) -> list[ToolSpec]:
        """The tools that the model is told of: those that `tool_choice` allows."""
        if not isinstance(self.tool_choice, AllowedChoice):
            return self.tools or []
        allowed = {one.function.name for one in self.tool_choice.allowed_tools.tools}
        return [tool for tool in self.tools or () if tool.function.name in allowed]
