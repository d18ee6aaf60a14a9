"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ostinato.runtime.choice_output import Delta, ShownToken
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.http.answer_parts import Collected, alternatives, dump, finite, new_id, usage
from ostinato.runtime.http.api_schema import ChatRequest, TokenizeRequest
from ostinato.runtime.http.chat_messages import template_messages
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.request_rules import check_prompt, fit, read_request, sampling_params
from ostinato.runtime.http.send_answer import send_answer
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.text import TextFrontEnd


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Parse, tokenize, generate, format."""
    state = request.app[STATE]
    fields = await read_request(request, ChatRequest)
    state.check_open()
    with cancelled_when_client_leaves(request):
        sampling = sampling_params(
            state,
            fields,
            limit=fields.token_limit,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        )
        window = state.engine.info.max_model_len
        prompt_ids = await state.text.off_loop(lambda: chat_prompt_ids(state.text, fields, window))
        check_prompt(prompt_ids, state.engine.info.vocab_size, "messages")
        sampling = fit(sampling, prompt_ids, window, param="messages")
        return await send_answer(request, fields, ChatAnswer(state, fields), [prompt_ids], [sampling])


def chat_prompt_ids(
    text: TextFrontEnd, fields: ChatRequest | TokenizeRequest, window: int | None = None
) -> list[int]:
    """Token ids of the rendered conversation, which must fit into `window`; the same for /tokenize."""
    messages = template_messages(fields.messages or [], text.chat_template or "")
    return text.encode_chat(
        messages,
        add_generation_prompt=fields.add_generation_prompt is not False,
        add_special_tokens=bool(fields.add_special_tokens),
        template_kwargs=fields.chat_template_kwargs,
        window=window,
    )


class ChatAnswer:
    """Renders deltas as chunks, or all of them as one body. What never changes is rendered once."""

    def __init__(self, state: ServerState, fields: ChatRequest) -> None:
        self.id = new_id("chatcmpl")
        self._head: dict[str, object] = {"created": int(time.time()), "model": state.model}
        self._codec = state.text.codec
        self._n = fields.n or 1
        self._logprobs = bool(fields.logprobs)
        self._top = fields.top_logprobs or 0
        self._usage = fields.includes_usage
        self._started: set[int] = set()
        head = dump({"id": self.id, "object": "chat.completion.chunk", **self._head})[:-1]
        self._prefix = f"data: {head},"
        self._suffix = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Chunks of one delta: the role before the first, the reason in a chunk of its own at the end."""
        index, out = choice.index, ""
        if index not in self._started:
            self._started.add(index)
            out = self._chunk(index, '{"role":"assistant","content":""}', "null", "null")
        if delta.text or (self._logprobs and delta.tokens):
            logprobs = dump(self._content(delta.tokens)) if self._logprobs else "null"
            out += self._chunk(index, f'{{"content":{dump(delta.text)}}}', logprobs, "null")
        if delta.finish_reason is not None:
            out += self._chunk(index, "{}", "null", f'"{delta.finish_reason}"')
        return out.encode()

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
                        "message": {"role": "assistant", "content": "".join(got.texts), "refusal": None},
                        "logprobs": self._content(got.tokens) if self._logprobs else None,
                        "finish_reason": got.finish_reason,
                    }
                    for choice, got in zip(choices, whole, strict=True)
                ],
                "usage": usage(choices, self._n),
            }
        )

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str) -> str:
        return (
            f'{self._prefix}"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{self._suffix}'
        )

    def _content(self, tokens: tuple[ShownToken, ...] | list[ShownToken]) -> dict[str, object]:
        return {"content": [_entry(self._codec, token, self._top) for token in tokens], "refusal": None}


def _entry(codec: TokenCodec, token: ShownToken, top: int) -> dict[str, Any]:  # Any: JSON of two depths
    chosen = finite(token.logprob.logprob) if token.logprob is not None else 0.0
    return {
        **_named(codec, token.token_id, chosen),
        "top_logprobs": [_named(codec, i, value) for i, value in alternatives(token.logprob, top)],
    }


def _named(codec: TokenCodec, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": codec.token_text(token_id),
        "logprob": logprob,
        "bytes": list(codec.token_bytes(token_id)),
    }
