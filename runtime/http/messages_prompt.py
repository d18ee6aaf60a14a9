"""A conversation of the Messages API as a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.http.chat_run import FieldNames, chat_request
from ostinato.runtime.http.messages_schema import (
    Message,
    MessagesRequest,
    PromptRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)

# Fields of a chat request by another name here.
_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "add_generation_prompt": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
}


def chat_of(fields: PromptRequest) -> tuple[ChatRequest, FieldNames]:
    """The same request for the chat route, and what its fields are called here."""
    messages, origins = _messages(fields)
    thinking = _thinking(fields)
    names = FieldNames(_NAMES, origins)
    if fields.output_config is not None and thinking["reasoning_effort"] == fields.output_config.effort:
        names = FieldNames({**_NAMES, "reasoning_effort": "output_config.effort"}, origins)
    values: dict[str, object] = {
        **(fields.shared() if isinstance(fields, MessagesRequest) else {}),
        "chat_template_kwargs": fields.chat_template_kwargs,
        "messages": messages,
        **_tools(fields),
        **thinking,
    }
    if fields.messages[-1].role == "assistant":  # the answer goes on where the client's words end
        values |= {"add_generation_prompt": False, "continue_final_message": True}
    if fields.output_config is not None and (wanted := fields.output_config.format) is not None:
        schema = {"name": "answer", "schema": wanted.json_schema, "strict": True}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(fields, MessagesRequest):
        values |= {"max_tokens": fields.max_tokens, "stop": fields.stop_sequences or None}
    return chat_request(values, names), names


def _messages(fields: PromptRequest) -> tuple[list[dict[str, object]], list[str]]:
    """Chat messages, and where each comes from. Turns of one role in a row are one, as Anthropic says."""
    messages: list[dict[str, object]] = []
    origins: list[str] = []
    if fields.system is not None and (text := _joined(fields.system)):
        messages.append({"role": "system", "content": text})
        origins.append("system")
    for at, message in enumerate(fields.messages):
        for made in _turn(message):
            last = messages[-1] if messages else None
            if last is not None and at and last["role"] == made["role"] and made["role"] != "tool":
                _merge(last, made)
            else:
                messages.append(made)
                origins.append(f"messages[{at}]")
    return messages, origins


def _turn(message: Message) -> list[dict[str, object]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content)]
    turn: list[dict[str, object]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            said = "" if block.content is None else _joined(block.content)
            turn.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
        elif isinstance(block, TextBlock):
            if turn and turn[-1]["role"] == message.role:
                turn[-1]["content"] = f"{turn[-1]['content']}\n{block.text}"
            else:
                turn.append({"role": message.role, "content": block.text})
    return turn or [{"role": message.role, "content": ""}]


def _assistant(blocks: Iterable[object]) -> dict[str, object]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedThinkingBlock():
                pass
    made: dict[str, object] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _merge(last: dict[str, object], more: dict[str, object]) -> None:
    for name in ("content", "reasoning_content"):
        if parts := [str(one[name]) for one in (last, more) if one.get(name)]:
            last[name] = "\n".join(parts)
    calls: list[object] = []
    for one in (last, more):
        if isinstance(made := one.get("tool_calls"), list):
            calls += made
    if calls:
        last["tool_calls"] = calls


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tools(fields: PromptRequest) -> dict[str, object]:
    choice = fields.tool_choice
    values: dict[str, object] = {}
    if fields.tools:
        values["tools"] = [_function(tool) for tool in fields.tools]
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        ours = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        values["tool_choice"] = ours[choice.type]
        if fields.tools and choice.disable_parallel_tool_use:
            values["parallel_tool_calls"] = False
    return values


def _function(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _thinking(fields: PromptRequest) -> dict[str, object]:
    """How hard the model thinks, if the request says anything of it."""
    effort = None if fields.output_config is None else fields.output_config.effort
    if fields.thinking is None:
        return {"reasoning_effort": effort}
    switch = {"disabled": "none", "enabled": effort or "medium", "adaptive": effort}
    budget = fields.thinking.budget_tokens
    return {"reasoning_effort": switch[fields.thinking.type], "thinking_token_budget": budget}
