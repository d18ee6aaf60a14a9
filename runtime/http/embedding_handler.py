"""POST /v1/embeddings."""

from __future__ import annotations

from aiohttp import web

from ostinato.runtime.http.answer_parts import dump
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.pooling_run import (
    Text,
    check_ids,
    encode_texts,
    kept_tokens,
    pooling_of,
    run_inputs,
    used,
)
from ostinato.runtime.http.pooling_schema import EmbeddingRequest
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.pooling.pool_check import check_dimensions
from ostinato.runtime.pooling.pool_text import Encoded, floats


async def embeddings(request: web.Request) -> web.StreamResponse:
    """A vector of each input."""
    state = request.app[STATE]
    fields = await read_request(request, EmbeddingRequest)
    state.check_open()
    if fields.dimensions is not None:
        check_dimensions(fields.dimensions, pooling_of(state))
    with cancelled_when_client_leaves(request):
        inputs = await _inputs(state, fields)
        _, results = await run_inputs(
            state, "embd", fields, inputs, dimensions=fields.dimensions, normalize=fields.normalize
        )
        is_text = fields.encoding_format == "base64"

        def render() -> str:
            data = [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": result.numbers if is_text else floats(result.numbers),
                }
                for index, result in enumerate(results)
            ]
            return dump({"object": "list", "data": data, "model": state.model, "usage": used(inputs)})

        return web.Response(text=await state.text.off_loop(render), content_type="application/json")


async def _inputs(state: ServerState, fields: EmbeddingRequest) -> list[Encoded]:
    given = fields.input
    if isinstance(given, str):
        texts = [Text("input", given)]
    elif isinstance(given[0], str):
        texts = [Text(f"input[{at}]", one) for at, one in enumerate(given) if isinstance(one, str)]
    else:
        return _token_inputs(state, fields)
    return await encode_texts(state, fields, texts, special=fields.add_special_tokens is not False)


def _token_inputs(state: ServerState, fields: EmbeddingRequest) -> list[Encoded]:
    given, kept = fields.input, kept_tokens(state, fields)
    if isinstance(given[0], list):
        named = [(f"input[{at}]", one) for at, one in enumerate(given) if isinstance(one, list)]
    else:
        named = [("input", [one for one in given if isinstance(one, int)])]
    inputs = []
    for param, ids in named:
        check_ids(state, ids[:kept], param)
        inputs.append(Encoded(tuple(ids[:kept]), ()))
    return inputs
