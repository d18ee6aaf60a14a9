"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same answers as chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from ostinato.runtime.http.answer_parts import new_id
from ostinato.runtime.http.chat_run import FieldNames, begin_chat, prompt_ids, run_chat
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.json_response import json_response
from ostinato.runtime.http.messages_errors import anthropic_error_body
from ostinato.runtime.http.messages_prompt import chat_of
from ostinato.runtime.http.messages_render import MessageAnswer
from ostinato.runtime.http.messages_schema import CountRequest, MessagesRequest
from ostinato.runtime.http.named_events import frame, stream_frames
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.server_state import REQUEST_ID, STATE, ServerState


async def create_message(request: web.Request) -> web.StreamResponse:
    """An answer to a conversation in Anthropic's form, whole or streamed."""
    state = request.app[STATE]
    fields = await read_request(request, MessagesRequest)
    state.check_open()
    with cancelled_when_client_leaves(request):
        chat, names = chat_of(fields)
        name = new_id("msg").replace("-", "_")
        choice = await begin_chat(state, chat, name, names)
        answer = MessageAnswer(name, state.model, choice, streams=bool(fields.stream))
        async with aclosing(_frames(state, choice, names, answer)) as frames:
            if fields.stream:
                return await stream_frames(request, frames, lambda error: _failed(request, error))
            async for _ in frames:
                pass
        return json_response(answer.body())


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of such a message has."""
    state = request.app[STATE]
    fields = await read_request(request, CountRequest)
    chat, names = chat_of(fields)
    ids = await prompt_ids(state, chat, names)
    return json_response({"input_tokens": len(ids)})


async def _frames(
    state: ServerState, choice: Choice, names: FieldNames, answer: MessageAnswer
) -> AsyncGenerator[bytes]:
    begun = False
    async with aclosing(run_chat(state, choice, names)) as news:
        async for events, _, reason, thought in news:
            out = b"" if begun else answer.begin()
            begun = True
            answer.reasoning_tokens = thought
            out += answer.push(events)
            if reason is not None:
                out += answer.finish(reason, choice.output.stop_string)
            yield out


def _failed(request: web.Request, error: Exception) -> bytes:
    return frame("error", anthropic_error_body(error, request[REQUEST_ID]).decode())
