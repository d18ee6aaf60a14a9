"""POST /tokenize and /detokenize, with the shapes of vLLM's routes."""

from __future__ import annotations

from aiohttp import web

from ostinato.runtime.http.api_schema import DetokenizeRequest, TokenizeRequest
from ostinato.runtime.http.chat_handler import chat_prompt_ids
from ostinato.runtime.http.json_response import json_response
from ostinato.runtime.http.request_rules import check_template, check_tokens, read_request
from ostinato.runtime.http.server_state import STATE


async def tokenize(request: web.Request) -> web.Response:
    """Ids of a prompt (special tokens as in /v1/completions) or of messages (as in /v1/chat/completions)."""
    state = request.app[STATE]
    fields = await read_request(request, TokenizeRequest)
    check_template(state, fields)

    def encode() -> list[int]:
        if fields.prompt is None:
            return chat_prompt_ids(state.text, fields)
        return state.text.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)

    ids = await state.text.off_loop(encode)
    names = [state.text.codec.token_text(i) for i in ids] if fields.return_token_strs else None
    answer = {
        "count": len(ids),
        "max_model_len": state.engine.info.max_model_len,
        "tokens": ids,
        "token_strs": names,
    }
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids, special tokens included, as one sequence from its start."""
    state = request.app[STATE]
    fields = await read_request(request, DetokenizeRequest)
    check_tokens(fields.tokens, state.engine.info.vocab_size, "tokens")
    text = await state.text.off_loop(lambda: state.text.decode(fields.tokens, skip_special=False))
    return json_response({"prompt": text})
