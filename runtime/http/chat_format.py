"""From the fields about tools and thinking to what the template is told and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ostinato.errors import InvalidRequest
from ostinato.runtime.choice_output import ChoiceOutput
from ostinato.runtime.http.server_state import ServerState
from ostinato.runtime.http.tool_schema import ToolRequest, ToolTemplateRequest
from ostinato.runtime.messages import SamplingParams

_PROMPT_END = 32  # tokens; enough for the marker with which some prompts begin the thoughts
_SWITCHES = ("enable_thinking", "thinking")

MakeOutput = Callable[[SamplingParams, Sequence[int]], ChoiceOutput]


def template_tools(fields: ToolTemplateRequest, template: str) -> list[dict[str, Any]] | None:
    """The tools as the template gets them. InvalidRequest if it does not show them."""
    if not fields.tools:
        return None
    if "tools" not in template:
        raise InvalidRequest("tools: this model's chat template does not show tools", param="tools")
    return [tool.model_dump(exclude_none=True) for tool in fields.tools]


def thinking_variables(fields: ToolTemplateRequest, template: str) -> dict[str, Any]:
    """Variables of the template for `reasoning_effort`. InvalidRequest if none would have an effect."""
    effort = fields.reasoning_effort
    if effort is None:
        return {}
    variables: dict[str, Any] = {}
    if "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    variables |= {name: effort != "none" for name in _SWITCHES if name in template}
    if not variables and (effort != "none" or "think" in template):
        raise InvalidRequest(
            "reasoning_effort: this model's chat template has no such setting; leave it out",
            param="reasoning_effort",
        )
    return variables


def check_tools(state: ServerState, fields: ToolRequest) -> None:
    """InvalidRequest for what cannot be done with this model's calls."""
    if not fields.tools or fields.tool_choice == "none":
        return
    if state.formats.tools is None:
        raise InvalidRequest(
            "tools: it is not known how this model writes tool calls; set server.tool_parser, or send "
            "tool_choice none",
            param="tools",
        )
    if fields.tool_choice not in (None, "auto"):
        raise InvalidRequest(
            "tool_choice: only none and auto are supported; a call cannot be forced", param="tool_choice"
        )


def output_maker(state: ServerState, fields: ToolRequest) -> MakeOutput:
    """How the choices of this answer are read."""
    formats, codec = state.formats, state.text.codec
    calls = bool(fields.tools) and fields.tool_choice != "none"
    one_call = calls and fields.parallel_tool_calls is False

    def make(sampling: SamplingParams, prompt_ids: Sequence[int]) -> ChoiceOutput:
        parser = None
        if formats.reasoning is not None or calls:
            end = codec.decode(prompt_ids[-_PROMPT_END:], skip_special=False)
            parser = formats.parser(calls=calls, tools=fields.tool_names, prompt_end=end)
        return ChoiceOutput(
            codec, sampling, parser, shown_special=state.shown_special if parser else frozenset(),
            one_call=one_call,
        )  # fmt: skip

    return make
