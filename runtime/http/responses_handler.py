"""POST /v1/responses, what its prompt has in tokens, and what can be done with a response later."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.answer_parts import dump, new_id
from ostinato.runtime.http.api_keys import Caller
from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.http.chat_run import FieldNames, begin_chat, prompt_ids
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.json_response import json_response
from ostinato.runtime.http.named_events import stream_frames
from ostinato.runtime.http.request_record import CURRENT
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.responses_items import ITEM, Item, ItemReference, MessageItem, TextPart
from ostinato.runtime.http.responses_prompt import chat_of, input_items
from ostinato.runtime.http.responses_render import ResponseAnswer, response_id
from ostinato.runtime.http.responses_runs import RESPONSES, ResponseRun, Responses
from ostinato.runtime.http.responses_schema import InputTokensRequest, PromptRequest, ResponsesRequest
from ostinato.runtime.http.server_state import STATE, ServerState

_LISTED = 20  # input items of one page, as OpenAI has it
_MOST_LISTED = 100
_ID_PREFIX = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def add_response_routes(app: web.Application) -> None:
    """The routes, and what they share. Responses still being made end behind the drain."""
    app[RESPONSES] = Responses(app[STATE])
    one = "/v1/responses/{id}"
    app.add_routes(
        [
            web.post("/v1/responses", create_response),
            web.post("/v1/responses/input_tokens", count_input_tokens),
            web.get(one, get_response),
            web.delete(one, delete_response),
            web.post(f"{one}/cancel", cancel_response),
            web.get(f"{one}/input_items", list_input_items),
        ]
    )

    async def close(app: web.Application) -> None:
        await app[RESPONSES].close()

    app.on_shutdown.append(close)


async def create_response(request: web.Request) -> web.StreamResponse:
    """An answer as items, whole, streamed or made in the background; kept unless `store` is false."""
    state, responses = request.app[STATE], request.app[RESPONSES]
    fields = await read_request(request, ResponsesRequest)
    state.check_open()
    with cancelled_when_client_leaves(request):
        run = await _begin(state, responses, fields)
        streams = bool(fields.stream)
        if fields.background:
            frames = responses.start(run)
            if not streams:
                return json_response(run.answer.body())
            async with aclosing(frames):
                return await stream_frames(request, frames, lambda error: b"")
        async with aclosing(_frames(state, responses, run)) as made:
            if streams:
                return await stream_frames(request, made, lambda error: _failed(responses, run, error))
            async for _ in made:
                pass
        return json_response(run.answer.body())


async def count_input_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of such a response has."""
    state, responses = request.app[STATE], request.app[RESPONSES]
    fields = await read_request(request, InputTokensRequest)
    asked = _read(responses, fields, _caller().name)
    ids = await prompt_ids(state, asked.chat, asked.names)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_response(request: web.Request) -> web.StreamResponse:
    """A response as far as it is; with `stream=true` its events, if it is one of the background."""
    responses, name, owner = request.app[RESPONSES], request.match_info["id"], _owner()
    stream = request.query.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream: must be true or false", param="stream")
    first = _number(request, "starting_after", -1, most=2**31) + 1
    body = responses.body(name, owner)
    if stream == "false":
        return _json(body)
    if not responses.has_frames(name, owner):
        raise InvalidRequest(
            "stream: only responses made with background=true and stream=true can be streamed again",
            param="stream",
        )
    with cancelled_when_client_leaves(request):
        async with aclosing(responses.follow(name, owner, first)) as frames:
            return await stream_frames(request, frames, lambda error: b"")


async def cancel_response(request: web.Request) -> web.Response:
    """End a response of the background. One that has ended already stays as it is."""
    body = await request.app[RESPONSES].cancel(request.match_info["id"], _owner())
    if body is None:
        raise InvalidRequest(
            "only responses made with background=true can be cancelled; others end when their client "
            "closes the connection"
        )
    return _json(body)


async def delete_response(request: web.Request) -> web.Response:
    """Forget a response."""
    name = request.match_info["id"]
    await request.app[RESPONSES].delete(name, _owner())
    return json_response({"id": name, "object": "response", "deleted": True})


async def list_input_items(request: web.Request) -> web.Response:
    """The input of a response by pages, newest first unless `order=asc`."""
    limit = _number(request, "limit", _LISTED, most=_MOST_LISTED, least=1)
    order, after = request.query.get("order", "desc"), request.query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", param="order")
    stored = request.app[RESPONSES].stored(request.match_info["id"], _owner())
    items = [ITEM.validate_json(item) for item in stored.input_items]
    texts = dict(zip([item.id or "" for item in items], stored.input_items, strict=True))
    ids = list(texts) if order == "asc" else list(texts)[::-1]
    if after is not None:
        if after not in texts:
            raise InvalidRequest(f"after: no item has the id {after[:80]!r}", param="after")
        ids = ids[ids.index(after) + 1 :]
    page = ids[:limit]
    head = {"object": "list", "first_id": page[0] if page else None, "last_id": page[-1] if page else None}
    rest = dump({**head, "has_more": len(ids) > limit})[1:]
    return _json(f'{{"data":[{",".join(texts[item_id] for item_id in page)}],{rest}')


@dataclass(frozen=True)
class _Asked:
    """A conversation: as a chat request, and as items, those of earlier responses as they are stored."""

    chat: ChatRequest
    names: FieldNames
    earlier: tuple[str, ...]
    new: list[Item]


def _read(responses: Responses, fields: PromptRequest, owner: str) -> _Asked:
    earlier: tuple[str, ...] = ()
    if (before := fields.previous_response_id) is not None:
        earlier = responses.stored(before, owner, param="previous_response_id").history
    new = [_resolved(item, at, responses, owner) for at, item in enumerate(input_items(fields))]
    _check_ids(new)
    chat, names = chat_of(fields, [ITEM.validate_json(item) for item in earlier], new)
    return _Asked(chat, names, earlier, new)


async def _begin(state: ServerState, responses: Responses, fields: ResponsesRequest) -> ResponseRun:
    caller = _caller()
    asked = _read(responses, fields, caller.name)
    name = response_id()
    choice = await begin_chat(state, asked.chat, name, asked.names)
    answer = ResponseAnswer(name, state.model, state.text.codec, fields, choice, streams=bool(fields.stream))
    return ResponseRun(
        caller=caller,
        choice=choice,
        names=asked.names,
        answer=answer,
        earlier=asked.earlier,
        new=tuple(_as_listed(item) for item in asked.new),
        keeps=fields.store is not False,
        background=bool(fields.background),
    )


def _resolved(item: Item, at: int, responses: Responses, owner: str) -> Item:
    if not isinstance(item, ItemReference):
        return item
    found = responses.store.item(item.id, owner)
    if found is None:
        param = f"input[{at}].id"
        raise InvalidRequest(f"{param}: no stored response has an item {item.id[:80]!r}", param=param)
    return ITEM.validate_json(found)


def _check_ids(items: Sequence[Item]) -> None:
    """An id is that of one item: the input is listed by ids."""
    seen: set[str] = set()
    for at, item in enumerate(items):
        if item.id in seen:
            param = f"input[{at}].id"
            raise InvalidRequest(f"{param}: {item.id[:80]!r} is the id of two items", param=param)
        if item.id is not None:
            seen.add(item.id)


def _as_listed(item: Item) -> str:
    """An input item as `/input_items` gives it: with an id, a message with its text in parts."""
    update: dict[str, object] = {}
    if item.id is None:
        update["id"] = new_id(_ID_PREFIX.get(item.type, "msg")).replace("-", "_")
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        if item.role == "assistant":
            update["content"] = [TextPart(type="output_text", text=item.content, annotations=[])]
        else:
            update["content"] = [TextPart(type="input_text", text=item.content)]
    return item.model_copy(update=update).model_dump_json(exclude_none=True)


async def _frames(state: ServerState, responses: Responses, run: ResponseRun) -> AsyncGenerator[bytes]:
    async with aclosing(run.frames(state)) as made:
        async for frames in made:
            if run.answer.status != "in_progress":
                responses.keep(run)  # before the client knows that it can ask
            yield b"".join(frames)


def _failed(responses: Responses, run: ResponseRun, error: Exception) -> bytes:
    frames = run.answer.fail(error)
    responses.keep(run)
    return b"".join(frames)


def _caller() -> Caller:
    """Who asks."""
    record = CURRENT.get()
    assert record is not None  # set for every request,
    assert record.caller is not None  # and looked at in front of these routes
    return record.caller


def _owner() -> str:
    """A response is there only for the key that made it."""
    return _caller().name


def _number(request: web.Request, name: str, default: int, *, most: int, least: int = 0) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise InvalidRequest(f"{name}: must be an integer of {least} to {most}", param=name)
    return int(text)


def _json(body: str) -> web.Response:
    return web.Response(text=body, content_type="application/json")
