"""From texts to numbers, for /v1/embeddings, /v1/score and /v1/rerank: tokenize, run together, count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ostinato.errors import EngineError, InvalidRequest, RequestAborted, RequestError
from ostinato.graph.facts import PoolingFacts
from ostinato.runtime.http.api_errors import GenerationTimeout
from ostinato.runtime.http.pooling_schema import PoolingRequest
from ostinato.runtime.http.request_record import CURRENT
from ostinato.runtime.http.request_rules import answer_id, check_tokens
from ostinato.runtime.http.server_state import ServerState
from ostinato.runtime.messages import PoolRequest, PoolResult
from ostinato.runtime.pooling.pool_check import check_length
from ostinato.runtime.pooling.pool_text import Encoded


class Text(NamedTuple):
    """An input: one text, or a pair; `param` is the field that it came in."""

    param: str
    first: str
    second: str | None = None


def pooling_of(state: ServerState) -> PoolingFacts:
    """What the model does; `read_request` has checked that it does such a thing."""
    pooling = state.engine.info.pooling
    assert pooling is not None
    return pooling


async def encode_texts(
    state: ServerState, fields: PoolingRequest, texts: Sequence[Text], *, special: bool = True
) -> list[Encoded]:
    """Token ids of each, by the rule of `truncate_prompt_tokens`. ContextTooLong, InvalidRequest."""
    window, kept = state.engine.info.max_model_len, kept_tokens(state, fields)

    def encode() -> list[Encoded]:
        return [
            state.text.encode_input(
                text.first,
                text.second,
                window=window,
                kept=kept,
                param=text.param,
                add_special_tokens=special,
            )
            for text in texts
        ]

    return await state.text.off_loop(encode)


def kept_tokens(state: ServerState, fields: PoolingRequest) -> int | None:
    """Most tokens of an input that is cut; None: none is."""
    window, asked = state.engine.info.max_model_len, fields.truncate_prompt_tokens
    if asked is not None and asked > window:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {asked} is over the model's window of {window} tokens",
            param="truncate_prompt_tokens",
        )
    return window if asked == -1 else asked


def check_ids(state: ServerState, ids: Sequence[int], param: str) -> None:
    """Token ids that came as such."""
    if not ids:
        raise InvalidRequest(f"{param}: must have at least one token", param=param)
    check_tokens(ids, state.engine.info.vocab_size, param)
    check_length(len(ids), state.engine.info.max_model_len, param=param)


async def run_inputs(
    state: ServerState,
    prefix: str,
    fields: PoolingRequest,
    inputs: Sequence[Encoded],
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
    sigmoid: bool | None = None,
) -> tuple[str, list[PoolResult]]:
    """Id of the answer, and the numbers of each input. They run together and have one fate."""
    name = answer_id(state, prefix, fields.request_id)
    requests = [
        PoolRequest(
            request_id=f"{name}-{index}",
            token_ids=one.token_ids,
            token_types=one.token_types if any(one.token_types) else (),
            dimensions=dimensions,
            normalize=normalize,
            sigmoid=sigmoid,
            priority=fields.priority or 0,
        )
        for index, one in enumerate(inputs)
    ]
    record = CURRENT.get()
    clocks = [state.metrics.clock(len(one.token_ids)) for one in inputs]
    outcome, limit_s = "cancelled", state.config.request_timeout_s
    for request in requests:
        state.live[request.request_id] = record.id if record is not None else ""
    try:
        async with asyncio.timeout(limit_s or None):
            results = await state.engine.pool(requests)
        outcome = "stop"
        for clock, result in zip(clocks, results, strict=True):
            clock.queued(result.queued_s)
        return name, results
    except TimeoutError:
        outcome = "abort"  # as of an answer that takes too long: the client did not leave
        raise GenerationTimeout(
            f"the answer was not complete within {limit_s:g} s (server.request_timeout_s)"
        ) from None
    except RequestAborted:
        outcome = "abort"
        raise
    except RequestError:
        outcome = "refused"
        raise
    except EngineError:
        outcome = "error"
        raise
    finally:
        for request, clock in zip(requests, clocks, strict=True):
            state.live.pop(request.request_id, None)
            clock.end(outcome)


def used(inputs: Sequence[Encoded]) -> dict[str, int]:
    """Usage: nothing is generated."""
    tokens = sum(len(one.token_ids) for one in inputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
