"""What the methods of `LLM` take. Anything else is an InvalidRequest that names the argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TypeGuard, cast

from ostinato.errors import InvalidRequest
from ostinato.runtime.chat_roles import role_fault
from ostinato.runtime.messages import SamplingParams

MAX_N = 128  # as over HTTP

Message = Mapping[str, object]


def read_prompts(prompts: object) -> list[str | tuple[int, ...]]:
    """One prompt or several: text, token ids (a sequence or a 1-D integer array), or a sequence of those."""
    given = _listed(prompts)
    if isinstance(given, str) or (_is_sequence(given) and len(given) > 0 and isinstance(given[0], Integral)):
        return [read_prompt(given, "prompts")]
    if not _is_sequence(given):
        raise InvalidRequest(
            f"prompts: got {_shown(prompts)}; give text, a list of token ids, or a list of either",
            param="prompts",
        )
    return [read_prompt(one, "prompts", f"prompts[{index}]") for index, one in enumerate(given)]


def read_prompt(prompt: object, param: str, place: str | None = None) -> str | tuple[int, ...]:
    """One prompt, text or token ids. `place` says where in `param` it is."""
    place = place or param
    given = _listed(prompt)
    if isinstance(given, str):
        return checked_text(given, param, place)
    if not _is_sequence(given):
        raise InvalidRequest(
            f"{place}: got {_shown(prompt)}; a prompt is text or a list of token ids", param=param
        )
    for index, one in enumerate(given):
        if type(one) is not int and (isinstance(one, bool) or not isinstance(one, Integral)):
            raise InvalidRequest(
                f"{place}[{index}]: got {_shown(one)}; in a list of token ids each must be an int",
                param=param,
            )
    return tuple(map(int, cast(Sequence[int], given)))


def checked_text(text: str, param: str, place: str) -> str:
    """The same text, if a tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{place}: character {error.start} is {text[error.start]!r}, half of a surrogate pair; give text "
            "that has a UTF-8 form",
            param=param,
        ) from None
    return text


def read_conversations(messages: object) -> list[Sequence[Message]]:
    """One conversation (messages) or several."""
    if not _is_sequence(messages):
        raise InvalidRequest(
            f'messages: got {_shown(messages)}; give a list like [{{"role": "user", "content": "..."}}]',
            param="messages",
        )
    if messages and _is_sequence(messages[0]):
        return [read_conversation(one, f"messages[{index}]") for index, one in enumerate(messages)]
    return [read_conversation(messages, "messages")]


def read_conversation(messages: object, place: str) -> Sequence[Message]:
    """One conversation: at least one message."""
    if not _is_sequence(messages):
        raise InvalidRequest(f"{place}: got {_shown(messages)}; give a list of messages", param="messages")
    if not messages:
        raise InvalidRequest(f"{place}: empty; give at least one message", param="messages")
    for index, one in enumerate(messages):
        if not isinstance(one, Mapping):
            raise InvalidRequest(
                f"{place}[{index}]: got {_shown(one)}; a message is a dict with role and content",
                param="messages",
            )
        if "role" not in one:
            raise InvalidRequest(f"{place}[{index}].role: is required", param="messages")
        if fault := role_fault(one["role"]):
            shown = json.dumps(one["role"], default=repr)[:80]
            raise InvalidRequest(f"{place}[{index}].role: {fault}; got {shown}", param="messages")
    return cast(Sequence[Message], messages)


def read_template_kwargs(template_kwargs: object) -> dict[str, object] | None:
    """Further variables of the chat template."""
    if template_kwargs is None:
        return None
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        raise InvalidRequest(
            f"template_kwargs: got {_shown(template_kwargs)}; give a dict of names and values, as in "
            '{"enable_thinking": False}',
            param="template_kwargs",
        )
    return dict(template_kwargs)


def check_truncation(tokens: object) -> None:
    """`truncate_prompt_tokens`."""
    if tokens is None or (
        isinstance(tokens, int) and not isinstance(tokens, bool) and (tokens == -1 or tokens > 0)
    ):
        return
    raise InvalidRequest(
        f"truncate_prompt_tokens: got {_shown(tokens)}; give how many tokens of each prompt to keep, -1 for "
        "as many as fit, or None",
        param="truncate_prompt_tokens",
    )


def read_documents(documents: object) -> list[dict[str, object]] | None:
    """Documents for the chat template."""
    if documents is None:
        return None
    if not _is_sequence(documents) or not all(isinstance(one, Mapping) for one in documents):
        raise InvalidRequest(
            f"documents: got {_shown(documents)}; give a list of dicts, as in "
            '[{"title": "...", "text": "..."}]',
            param="documents",
        )
    return [dict(one) for one in cast(Sequence[Mapping[str, object]], documents)]


def check_template(chat_template: object) -> None:
    """A chat template in place of the model's."""
    if not isinstance(chat_template, str | None):
        raise InvalidRequest(
            f"chat_template: got {_shown(chat_template)}; give the text of a Jinja template, or None",
            param="chat_template",
        )


def check_queueing(priority: object, cache_salt: object) -> None:
    """What orders requests, and what separates their prefixes."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequest(
            f"priority: got {_shown(priority)}; give an int, lower runs first", param="priority"
        )
    if not isinstance(cache_salt, str):
        raise InvalidRequest(f"cache_salt: got {_shown(cache_salt)}; give a str", param="cache_salt")


def check_n(n: object) -> None:
    """Answers per prompt."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n: got {_shown(n)}; give an int from 1 to {MAX_N}", param="n")


def read_sampling(sampling: object, prompts: int) -> Sequence[SamplingParams]:
    """One for each of `prompts`, from one for all or one for each."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * prompts
    if not _is_sequence(sampling):
        raise InvalidRequest(
            f"sampling: got {_shown(sampling)}; give SamplingParams(...), or a list of one for each prompt",
            param="sampling",
        )
    for index, one in enumerate(sampling):
        if not isinstance(one, SamplingParams):
            raise InvalidRequest(
                f"sampling[{index}]: got {_shown(one)}; give SamplingParams(...)", param="sampling"
            )
    if len(sampling) != prompts:
        raise InvalidRequest(
            f"sampling: {len(sampling)} for {prompts} prompts; give one for each, or one for all",
            param="sampling",
        )
    return cast(Sequence[SamplingParams], sampling)


def _listed(value: object) -> object:
    """Arrays of numpy and torch as lists; neither is imported."""
    if not isinstance(value, str) and hasattr(value, "dtype") and hasattr(value, "tolist"):
        listed: object = value.tolist()
        return listed
    return value


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _shown(value: object) -> str:
    return f"{repr(value)[:60]} ({type(value).__name__})"
