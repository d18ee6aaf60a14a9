"""POST /v1/score and /v1/rerank: how well two texts fit, by a cross-encoder or by the angle of vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.json_response import json_response
from ostinato.runtime.http.pooling_run import Text, encode_texts, pooling_of, run_inputs, used
from ostinato.runtime.http.pooling_schema import PoolingRequest, RerankRequest, ScoreRequest, as_list
from ostinato.runtime.http.request_rules import read_request
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.pooling.pool_check import check_activation
from ostinato.runtime.pooling.pool_text import Encoded, floats
from ostinato.runtime.pooling.score_pairs import cosines, pairs_of


async def score(request: web.Request) -> web.StreamResponse:
    """A score of each pair of texts."""
    state = request.app[STATE]
    fields = await read_request(request, ScoreRequest)
    state.check_open()
    with cancelled_when_client_leaves(request):
        first, second = as_list(fields.text_1), as_list(fields.text_2)
        name, scores, inputs = await _scores(
            state, "score", fields, first, second, ("text_1", "text_2"), sigmoid=fields.use_activation
        )
    data = [{"index": at, "object": "score", "score": value} for at, value in enumerate(scores)]
    return json_response(
        {
            "id": name,
            "object": "list",
            "created": int(time.time()),
            "model": state.model,
            "data": data,
            "usage": used(inputs),
        }
    )


async def rerank(request: web.Request) -> web.StreamResponse:
    """The documents by how well they fit the query, best first."""
    state = request.app[STATE]
    fields = await read_request(request, RerankRequest)
    state.check_open()
    documents = [one if isinstance(one, str) else one.text for one in fields.documents]
    with cancelled_when_client_leaves(request):
        name, scores, inputs = await _scores(
            state, "rerank", fields, [fields.query], documents, ("query", "documents"),
            sigmoid=fields.use_activation,
        )  # fmt: skip
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[: fields.top_n or None]
    shows = fields.return_documents is not False
    results = [
        {
            "index": at,
            "relevance_score": scores[at],
            **({"document": {"text": documents[at]}} if shows else {}),
        }
        for at in best
    ]
    return json_response({"id": name, "model": state.model, "results": results, "usage": used(inputs)})


async def _scores(
    state: ServerState,
    prefix: str,
    fields: PoolingRequest,
    first: Sequence[str],
    second: Sequence[str],
    params: tuple[str, str],
    *,
    sigmoid: bool | None,
) -> tuple[str, list[float], list[Encoded]]:
    """Id of the answer, a score for each of `second`, and what was computed for them."""
    pooling = pooling_of(state)
    check_activation(sigmoid, pooling)
    for param, texts in zip(params, (first, second), strict=True):
        if "" in texts:
            raise InvalidRequest(f"{param}: must not be empty", param=param)
    if pooling.task == "embed":
        return await _angles(state, prefix, fields, first, second, params)
    pairs = [Text(params[1], *pair) for pair in pairs_of(first, second)]
    inputs = await encode_texts(state, fields, pairs)
    name, results = await run_inputs(state, prefix, fields, inputs, sigmoid=sigmoid)
    return name, [floats(result.numbers)[0] for result in results], inputs


async def _angles(
    state: ServerState,
    prefix: str,
    fields: PoolingRequest,
    first: Sequence[str],
    second: Sequence[str],
    params: tuple[str, str],
) -> tuple[str, list[float], list[Encoded]]:
    """Cosines of the angles between vectors. Each text is computed once."""
    texts = [Text(params[0], one) for one in first] + [Text(params[1], one) for one in second]
    inputs = await encode_texts(state, fields, texts)
    name, results = await run_inputs(state, prefix, fields, inputs, normalize=True)

    def compare() -> list[float]:
        vectors = [floats(result.numbers) for result in results]
        return cosines(vectors[: len(first)], vectors[len(first) :])

    return name, await state.text.off_loop(compare), inputs
