"""One chat answer for the routes that are not OpenAI's chat: asked as a chat request, told as events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from ostinato.errors import RequestError
from ostinato.runtime.choice_output import Delta, ShownToken
from ostinato.runtime.http.api_errors import refusal
from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.http.chat_format import output_maker
from ostinato.runtime.http.chat_handler import chat_prompt_ids, chat_ready
from ostinato.runtime.http.choices import Choice, make_choices, run_choices
from ostinato.runtime.http.request_rules import check_prompt
from ostinato.runtime.http.server_state import ServerState
from ostinato.runtime.messages import FinishReason
from ostinato.runtime.output.events import Content, Event


@dataclass(frozen=True)
class FieldNames:
    """What a route calls the fields of a chat request, so that a refusal names what the client wrote.

    `messages[i]` is `origins[i]`; `fields` has the other names.
    """

    fields: Mapping[str, str]
    origins: Sequence[str]

    def of(self, param: str) -> str:
        """The client's name of `param`."""
        if (message := re.match(r"messages\[(\d+)\]", param)) and int(message[1]) < len(self.origins):
            return self.origins[int(message[1])]
        name = param.split(".")[0].split("[")[0]
        if name in self.fields:
            return self.fields[name]
        return param.replace(".function.", ".")  # tools have no such layer elsewhere


class News(NamedTuple):
    """Events of an answer that came together. With `finish_reason` set nothing follows.

    `reasoning_tokens` are those of the whole answer so far.
    """

    events: list[Event]
    tokens: tuple[ShownToken, ...]
    finish_reason: FinishReason | None
    reasoning_tokens: int


@contextmanager
def refused_as(names: FieldNames) -> Iterator[None]:
    """A RequestError of this block speaks of the client's fields."""
    try:
        yield
    except RequestError as error:
        if error.param is None:
            raise
        ours, message = names.of(error.param), str(error)
        if message.startswith(error.param):
            what = ": the text of a call's arguments" if error.param.endswith(".function.arguments") else ""
            message = ours + what + message[len(error.param) :]
        raise type(error)(message, param=ours) from None


def chat_request(values: Mapping[str, object], names: FieldNames) -> ChatRequest:
    """A chat request of `values` that are not None. InvalidRequest in the words of `names`."""
    with refused_as(names):
        try:
            return ChatRequest.model_validate({k: v for k, v in values.items() if v is not None})
        except ValidationError as error:
            raise refusal(error) from None


async def prompt_ids(state: ServerState, chat: ChatRequest, names: FieldNames) -> list[int]:
    """Token ids of the conversation, which leave room for an answer."""
    window = state.engine.info.max_model_len
    with refused_as(names):
        ids = await state.text.off_loop(lambda: chat_prompt_ids(state.text, chat, window))
        check_prompt(ids, state.engine.info.vocab_size, "messages")
        return ids


async def begin_chat(state: ServerState, chat: ChatRequest, request_id: str, names: FieldNames) -> Choice:
    """The one sequence of an answer, ready to run."""
    with refused_as(names):
        ids, sampling = await chat_ready(state, chat)
    (choice,) = make_choices(
        state,
        request_id,
        [ids],
        [sampling],
        1,
        priority=chat.priority or 0,
        cache_salt=chat.cache_salt or "",
        make_output=output_maker(state, chat),
    )
    return choice


async def run_chat(state: ServerState, choice: Choice, names: FieldNames) -> AsyncGenerator[News]:
    """What the answer says, as it comes. Closing it ends the sequence; raises what `run_choices` raises."""
    # The engine may still refuse it: that is where a grammar is compiled.
    with refused_as(names):
        async with aclosing(run_choices(state, [choice])) as deltas:
            async for _, delta in deltas:
                thought = choice.output.num_reasoning_tokens
                yield News(_events(delta), delta.tokens, delta.finish_reason, thought)


def _events(delta: Delta) -> list[Event]:
    """`parts` of a choice whose text is parsed; else its text is all content."""
    return list(delta.parts) or ([Content(delta.text)] if delta.text else [])
