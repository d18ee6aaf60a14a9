"""A request of the Responses API as a chat request."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.http.chat_run import FieldNames, chat_request
from ostinato.runtime.http.responses_items import (
    CallOutputItem,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    TextPart,
    Tool,
)
from ostinato.runtime.http.responses_schema import PromptRequest, ResponsesRequest, TextFormat, ToolChoice

# Fields of a chat request by another name here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def input_items(fields: PromptRequest) -> list[Item]:
    """The new items; a string is a message of the user."""
    if isinstance(fields.input, str):
        return [MessageItem(role="user", content=fields.input)]
    return list(fields.input)


def chat_of(
    fields: PromptRequest, earlier: Sequence[Item], new: Sequence[Item]
) -> tuple[ChatRequest, FieldNames]:
    """The same request for the chat route, and what its fields are called here.

    The conversation is `earlier`, of the response before, and then `new`; references are resolved already.
    """
    origins = ["previous_response_id"] * len(earlier) + [f"input[{at}]" for at in range(len(new))]
    if isinstance(fields.input, str):
        origins[-1] = "input"
    messages, sources = _messages(fields.instructions, [*earlier, *new], origins)
    names = FieldNames(_NAMES, sources)
    values: dict[str, object] = {
        **_generation(fields),
        "chat_template_kwargs": fields.chat_template_kwargs,
        "messages": messages,
        **_tools(fields),
    }
    if fields.reasoning is not None:
        values["reasoning_effort"] = fields.reasoning.effort
    if fields.text is not None and fields.text.format is not None:
        values["response_format"] = _response_format(fields.text.format)
    return chat_request(values, names), names


def _generation(fields: PromptRequest) -> dict[str, object]:
    """How the answer is generated, if there is to be one."""
    if not isinstance(fields, ResponsesRequest):
        return {}
    values: dict[str, object] = {
        **fields.shared(),
        "stop": fields.stop,
        "thinking_token_budget": fields.thinking_token_budget,
        "max_completion_tokens": fields.max_output_tokens,
    }
    if fields.wants_logprobs:
        values |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return values


def _messages(
    instructions: str | None, items: Sequence[Item], origins: Sequence[str]
) -> tuple[list[dict[str, object]], list[str]]:
    """Chat messages, and where each comes from.

    Reasoning, text and calls of one turn of the model are one message.  System messages that directly follow
    the instructions are one with them: most templates know only one, at the beginning.
    """
    messages: list[dict[str, object]] = []
    sources: list[str] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
        sources.append("instructions")

    def add(origin: str, **message: object) -> dict[str, object]:
        messages.append(message)
        sources.append(origin)
        return message

    def turn(origin: str, *, holds: Sequence[str]) -> dict[str, object]:
        """The model's turn that is still open for more: it has none of `holds` yet."""
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and not any(last.get(name) for name in holds):
            return last
        return add(origin, role="assistant", content="")

    for item, origin in zip(items, origins, strict=True):
        match item:
            case MessageItem(role="assistant"):
                turn(origin, holds=("content", "tool_calls"))["content"] = _text(item.content)
            case MessageItem():
                text = _text(item.content)
                if (
                    len(messages) == 1
                    and sources[0] == "instructions"
                    and item.role in ("system", "developer")
                ):
                    messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
                else:
                    add(origin, role=item.role, content=text)
            case ReasoningItem():
                if thought := item.text:
                    held = ("content", "tool_calls", "reasoning_content")
                    turn(origin, holds=held)["reasoning_content"] = thought
            case FunctionCallItem():
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                message = turn(origin, holds=())
                earlier = message.get("tool_calls")
                message["tool_calls"] = [*(earlier if isinstance(earlier, list) else ()), call]
            case CallOutputItem():
                add(origin, role="tool", tool_call_id=item.call_id, content=_text(item.output))
    return messages, sources


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _tools(fields: PromptRequest) -> dict[str, object]:
    tools, choice = list(fields.tools or ()), fields.tool_choice
    if isinstance(choice, ToolChoice) and choice.tools is not None:
        allowed = [str(tool["name"]) for tool in choice.tools]
        if unknown := sorted(set(allowed) - {tool.name for tool in tools}):
            raise InvalidRequest(
                f"tool_choice.tools: {unknown[0]!r:.80} is not among the tools", param="tool_choice.tools"
            )
        tools = [tool for tool in tools if tool.name in allowed]
        choice = choice.mode
    values: dict[str, object] = {}
    if tools:
        values["tools"] = [_function(tool) for tool in tools]
        values["parallel_tool_calls"] = fields.parallel_tool_calls
    if isinstance(choice, ToolChoice):
        values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        values["tool_choice"] = choice
    return values


def _function(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    for name in ("description", "parameters", "strict"):
        if (value := getattr(tool, name)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _response_format(wanted: TextFormat) -> dict[str, object]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    inner: dict[str, object] = {"name": wanted.name, "schema": wanted.json_schema}
    for name in ("description", "strict"):
        if (value := getattr(wanted, name)) is not None:
            inner[name] = value
    return {"type": "json_schema", "json_schema": inner}
