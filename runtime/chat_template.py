"""A conversation becomes the text of a prompt, through the model's chat template, in transformers' sandbox.

Some templates print a message's content, some loop over its parts, some do both. Which one this is cannot be
read off the source (the loop may sit in a macro, over a parameter), so it is tried: a template reads a form
if a word that is put in comes out, and comes out as itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ostinato.runtime.template_guard import limit_output

Conversation = Sequence[Mapping[str, object]]

_WORD = "zyxwvut"  # no template says this itself, in any case or language


def prepare() -> None:
    """Import what rendering needs, uninterrupted: 0.6 s (2-core CPU machine) the first time."""
    import transformers.utils.chat_template_utils  # noqa: F401


class Forms(NamedTuple):
    """In which forms a template reads the content of messages. Neither: a list of which it reads one part."""

    text: bool
    parts: bool


def render_conversation(
    template: str,
    messages: Conversation,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, Any] | None = None,  # Any: the template's own business
) -> str:
    """The prompt text. Raises whatever the template raises.

    Content is given in the form in which it came if the template reads that, else in another one: parts are
    joined by newlines, a text becomes one part.
    """
    return _render(
        template,
        [_shaped(template, message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        documents=documents,
        **(variables or {}),
    )


@lru_cache(maxsize=64)
def content_forms(template: str, role: str) -> Forms:
    """Tries a conversation with a message of this role. A template that refuses it is taken to read text."""
    both = f"{_WORD} {_WORD}"
    text = _says(template, role, both)
    parts = _says(template, role, [_part(_WORD), _part(_WORD)])
    if not text and not parts:
        text = not _says(template, role, [_part(both)])
    return Forms(text, parts)


@lru_cache(maxsize=64)
def wants_json_arguments(template: str) -> bool:
    """Whether arguments of tool calls must be JSON text: mappings fail, or come out as Python writes them."""
    mapping = _call_said(template, {_WORD: _WORD})
    if mapping is not None and f"'{_WORD}': '{_WORD}'" not in mapping:
        return False
    as_text = _call_said(template, f'{{"{_WORD}": "{_WORD}"}}')
    return as_text is not None and f'{{"{_WORD}": "{_WORD}"}}' in as_text


@lru_cache(maxsize=64)
def prints_any_arguments(template: str) -> bool:
    """Whether arguments of tool calls may be text that is no JSON object, as models write at times."""
    said = _call_said(template, _WORD)
    return said is not None and _WORD in said


def _call_said(template: str, arguments: object) -> str | None:
    """How a conversation with one call is written; None if the template refuses it."""
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "000000000", "content": "a"},
    ]
    try:
        return _render(template, messages, add_generation_prompt=False)
    except Exception:  # a template is a program: it may object in any way
        return None


def _with_json_arguments(message: Mapping[str, object]) -> dict[str, object]:
    calls: list[object] = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), Mapping):
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**function, "arguments": text}})
        else:
            calls.append(call)
    return {**message, "tool_calls": calls}


def _shaped(template: str, message: Mapping[str, object]) -> dict[str, object]:
    if message.get("tool_calls") and wants_json_arguments(template):
        message = _with_json_arguments(message)
    content, role = message.get("content"), message.get("role")
    if not content or not isinstance(content, str | list) or not isinstance(role, str):
        return dict(message)
    forms = content_forms(template, role)
    if isinstance(content, str):
        return dict(message) if forms.text else {**message, "content": [_part(content)]}
    if forms.parts or not all(isinstance(part, Mapping) and "text" in part for part in content):
        return dict(message)
    joined = "\n".join(str(part["text"]) for part in content)
    return {**message, "content": joined if forms.text else [_part(joined)]}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _says(template: str, role: str, content: object) -> bool:
    """Both words come out, and nothing of how Python or JSON write a list of parts."""
    before: list[dict[str, object]] = [] if role in ("system", "user") else [{"role": "user", "content": "a"}]
    if role == "tool":
        function = {"name": "f", "arguments": {}}
        call = {"id": "000000000", "type": "function", "function": function}
        before.append({"role": "assistant", "content": "", "tool_calls": [call]})
    message: dict[str, object] = {"role": role, "content": content}
    if role == "tool":
        message |= {"name": "f", "tool_call_id": "000000000"}
    after: list[dict[str, object]] = [{"role": "user", "content": "a"}] if role == "system" else []
    try:
        said = _render(template, [*before, message, *after], add_generation_prompt=False)
    except Exception:  # a template is a program: it may object in any way
        return False
    words = said.count(_WORD)
    return words >= 2 and not any(f"{quote}text{quote}: {quote}{_WORD}" in said for quote in "'\"")


def _render(
    template: str, messages: list[dict[str, object]], **rest: Any
) -> str:  # Any: arguments of the library
    # Imported late: 0.6 s (2-core CPU machine) that a start without chat template need not wait for.
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    limit_output(_compile_jinja_template(template))  # compiled once; the next line gets the same object
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, **rest)
    return str(rendered[0])
