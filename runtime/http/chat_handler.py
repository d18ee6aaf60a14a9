"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ostinato.errors import InvalidRequest
from ostinato.runtime.choice_output import Delta, ShownToken
from ostinato.runtime.http.answer_parts import (
    UNFINISHED,
    Collected,
    alternatives,
    dump,
    finished,
    finite,
    prompt_records,
    stop_reason,
    token_namer,
    usage,
)
from ostinato.runtime.http.api_schema import ChatRequest, TokenizeRequest
from ostinato.runtime.http.chat_format import (
    chat_sampling,
    check_tools,
    output_maker,
    template_tools,
    thinking_variables,
)
from ostinato.runtime.http.chat_messages import template_messages
from ostinato.runtime.http.chat_parts import content_json, delta_json, finish_reason, message
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.request_rules import (
    answer_id,
    check_prompt,
    check_template,
    fit,
    read_request,
    sampling_params,
)
from ostinato.runtime.http.request_template import render_request_template
from ostinato.runtime.http.send_answer import send_answer
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.prompt_room import kept_tokens, room_left
from ostinato.runtime.text import SHORT, TextFrontEnd

_MESSAGE_WORTH = 64  # characters; what a template writes around a message


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """An answer to a conversation, whole or streamed."""
    state = request.app[STATE]
    fields = await read_request(request, ChatRequest)
    state.check_open()
    with cancelled_when_client_leaves(request):
        prompt_ids, sampling = await chat_ready(state, fields)
        return await send_answer(
            request,
            fields,
            ChatAnswer(state, fields),
            [prompt_ids],
            [sampling],
            make_output=output_maker(state, fields),
        )


async def chat_ready(state: ServerState, fields: ChatRequest) -> tuple[list[int], SamplingParams]:
    """Prompt and sampling of an answer, all checked. Every API whose requests become chats asks here."""
    check_template(state, fields)
    check_tools(state, fields, _template(state.text, fields))
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    sampling = sampling_params(state, fields, limit=fields.token_limit, logprobs=logprobs)
    window = state.engine.info.max_model_len
    prompt_ids = await state.text.off_loop(
        lambda: chat_prompt_ids(state.text, fields, window), is_short=_is_short(fields)
    )
    check_prompt(prompt_ids, state.engine.info.vocab_size, "messages")
    sampling = fit(sampling, prompt_ids, window, param="messages")
    return prompt_ids, chat_sampling(state, fields, sampling, prompt_ids)


def _template(text: TextFrontEnd, fields: ChatRequest | TokenizeRequest) -> str:
    """The request's own, or the model's; empty: there is none."""
    return fields.chat_template if fields.chat_template is not None else text.chat_template or ""


def _is_short(fields: ChatRequest) -> bool:
    """Whether the model's template, given this, is soon done: a few words, and nothing it could loop over."""
    if fields.chat_template_kwargs or fields.chat_template is not None or fields.documents or fields.tools:
        return False
    room = SHORT
    for one in fields.messages:
        if not isinstance(one.content, str) or one.tool_calls:
            return False
        room -= len(one.content) + len(one.reasoning_content or one.reasoning or "") + _MESSAGE_WORTH
    return room >= 0


def chat_prompt_ids(
    text: TextFrontEnd, fields: ChatRequest | TokenizeRequest, window: int | None = None
) -> list[int]:
    """Token ids of the rendered conversation, which must fit into `window`; the same for /tokenize."""
    continues = bool(fields.continue_final_message)
    given: dict[str, Any] = {  # Any: the template's own business
        "add_generation_prompt": fields.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
        "documents": fields.documents,
    }
    template = _template(text, fields)
    if fields.documents and "documents" not in template:
        raise InvalidRequest(
            "documents: this chat template never reads them; leave them out", param="documents"
        )
    messages = template_messages(fields.messages or [], template)
    given["tools"] = template_tools(fields, template)
    variables = {**thinking_variables(fields, template), **(fields.chat_template_kwargs or {})}
    if fields.chat_template is None:
        prompt = text.render_chat(messages, template_kwargs=variables, **given)
    else:
        variables = text.template_variables(variables)
        arguments = {"template": template, "messages": messages, "variables": variables, **given}
        prompt = render_request_template(arguments, text.template_timeout_s)
    kept = None
    if window is not None and isinstance(fields, ChatRequest):
        kept = kept_tokens(fields.truncate_prompt_tokens, fields.token_limit, window)
    special = bool(fields.add_special_tokens)
    if window is None:
        return text.encode(prompt, add_special_tokens=special)
    if kept is None:
        return text.encode_within(window, prompt, param="messages", add_special_tokens=special)
    ids = text.encode(prompt, add_special_tokens=special)[-kept:]
    room_left(len(ids), window, param="messages")
    return ids


class ChatAnswer:
    """Renders deltas as chunks, or all of them as one body. What never changes is rendered once."""

    def __init__(self, state: ServerState, fields: ChatRequest) -> None:
        self.id = answer_id(state, "chatcmpl", fields.request_id)
        self._head: dict[str, object] = {"created": int(time.time()), "model": state.model}
        self._codec = state.text.codec
        self._named = token_namer(self._codec, as_ids=fields.return_tokens_as_token_ids)
        self._echoed = fields.echoed
        self._n = fields.n or 1
        self._with_reasoning = fields.include_reasoning is not False
        self._logprobs = bool(fields.logprobs)
        self._top = len(fields.logprob_token_ids or ()) or fields.top_logprobs or 0
        self._prompt_top = fields.prompt_logprobs
        self._ids = bool(fields.return_token_ids)
        self._usage = fields.includes_usage
        self._repeats = fields.repeats_usage
        self._started: set[int] = set()
        head = dump({"id": self.id, "object": "chat.completion.chunk", **self._head})[:-1]
        self._prefix = f"data: {head},"
        self._suffix = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Chunks of one delta: the role before the first, the reason in a chunk of its own at the end."""
        out = ""
        if choice.index not in self._started:
            out = self._chunk(choice, '{"role":"assistant","content":""}', more=self._of_prompt(choice))
            if self._echoed:
                out += self._chunk(choice, content_json(self._echoed))
            self._started.add(choice.index)
        ids = choice.take_ids() if self._ids else []
        logprobs = dump(self._content(delta.tokens)) if self._logprobs else "null"
        said = self._said(delta)
        if not said and ((self._logprobs and delta.tokens) or (ids and delta.finish_reason is None)):
            said = ['{"content":""}']
        for one in said:
            out += self._chunk(choice, one, logprobs, ids=ids)
            logprobs, ids = "null", []  # they stand with the first
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, choice.output.num_calls)
            out += self._chunk(choice, "{}", end=finished(reason, stop_reason(choice)), ids=ids)
        return out.encode()

    def _said(self, delta: Delta) -> list[str]:
        if not delta.parts:  # nearly always: it is all content
            return [content_json(delta.text)] if delta.text else []
        made = [delta_json(part, with_reasoning=self._with_reasoning) for part in delta.parts]
        return [one for one in made if one is not None]

    def closing(self, choices: list[Choice]) -> bytes:
        """The usage chunk, when asked for."""
        if not self._usage:
            return b""
        return f'{self._prefix}"choices":[],"usage":{dump(usage(choices, self._n))}}}\n\n'.encode()

    def body(self, choices: list[Choice], whole: list[Collected]) -> str:
        """The answer in one piece."""
        return dump(
            {
                "id": self.id,
                "object": "chat.completion",
                **self._head,
                "choices": [
                    {
                        "index": choice.index,
                        "message": message(
                            self._echoed + "".join(got.texts),
                            got.parts,
                            with_reasoning=self._with_reasoning,
                        ),
                        "logprobs": self._content(got.tokens) if self._logprobs else None,
                        "finish_reason": finish_reason(got.finish_reason, choice.output.num_calls),
                        "stop_reason": stop_reason(choice),
                        **({"token_ids": choice.take_ids()} if self._ids else {}),
                    }
                    for choice, got in zip(choices, whole, strict=True)
                ],
                "usage": usage(choices, self._n),
                **self._of_prompt(choices[0]),
            }
        )

    def _of_prompt(self, choice: Choice) -> dict[str, object]:
        """What was asked about the prompt: once per answer, with its first choice."""
        told: dict[str, object] = {}
        if self._started or choice.index:
            return told
        if self._prompt_top is not None:
            told["prompt_logprobs"] = prompt_records(self._codec, choice, self._prompt_top)
        if self._ids:
            told["prompt_token_ids"] = choice.request.prompt_token_ids
        return told

    def _chunk(
        self,
        choice: Choice,
        delta: str,
        logprobs: str = "null",
        *,
        end: str = UNFINISHED,
        ids: list[int] | None = None,
        more: dict[str, object] | None = None,
    ) -> str:
        own = f',"token_ids":{dump(ids or [])}' if self._ids else ""
        suffix = f',"usage":{dump(usage([choice], 1))}}}\n\n' if self._repeats else self._suffix
        above = f"{dump(more)[1:-1]}," if more else ""
        return (
            f'{self._prefix}{above}"choices":[{{"index":{choice.index},"delta":{delta},"logprobs":{logprobs},'
            f"{end}{own}}}]{suffix}"
        )

    def _content(self, tokens: tuple[ShownToken, ...] | list[ShownToken]) -> dict[str, object]:
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: ShownToken) -> dict[str, Any]:  # Any: JSON of two depths
        chosen = finite(token.logprob.logprob) if token.logprob is not None else 0.0
        top = alternatives(token.logprob, self._top)
        return {
            **self._one(token.token_id, chosen),
            "top_logprobs": [self._one(i, value) for i, value in top],
        }

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._named(token_id),
            "logprob": logprob,
            "bytes": list(self._codec.token_bytes(token_id)),
        }
