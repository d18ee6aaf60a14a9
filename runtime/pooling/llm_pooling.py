"""What is behind `LLM.embed` and `LLM.score`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.llm_arguments import checked_text, read_prompts
from ostinato.runtime.llm_session import Session
from ostinato.runtime.messages import PoolRequest, PoolResult
from ostinato.runtime.pooling.pool_check import check_pool_request
from ostinato.runtime.pooling.pool_text import Encoded, floats
from ostinato.runtime.pooling.score_pairs import cosines, pairs_of
from ostinato.runtime.request_check import METHODS, check_task, wrong_task
from ostinato.runtime.request_output import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)


class Options(NamedTuple):
    """What all inputs of a call have in common."""

    truncate: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    sigmoid: bool | None = None
    priority: int = 0
    progress: bool | None = None


def embed(session: Session, prompts: object, options: Options) -> list[EmbeddingRequestOutput]:
    """A vector of each prompt, which is text or token ids."""
    check_task("embed", session.client.info, METHODS)
    given = read_prompts(prompts)
    inputs = [_prompt(session, one, f"prompts[{at}]", options) for at, one in enumerate(given)]
    requests = _requests(session, inputs, options)
    results = _results(session, requests, options)
    return [
        EmbeddingRequestOutput(
            request.request_id,
            one if isinstance(one, str) else None,
            request.token_ids,
            EmbeddingOutput(floats(result.numbers)),
        )
        for one, request, result in zip(given, requests, results, strict=True)
    ]


def score(session: Session, first: object, second: object, options: Options) -> list[ScoringRequestOutput]:
    """A score of each pair."""
    pooling = session.client.info.pooling
    if pooling is None:
        raise wrong_task("score", session.client.info, METHODS)
    left, right = _texts(first, "queries"), _texts(second, "documents")
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"documents: {len(right)} for {len(left)} queries; give as many, or one query", param="documents"
        )
    pairs = pairs_of(left, right)
    if pooling.task == "score":
        inputs = [_encoded(session, a, b, f"documents[{at}]", options) for at, (a, b) in enumerate(pairs)]
        requests = _requests(session, inputs, options)
        results = _results(session, requests, options)
        scores = [floats(result.numbers)[0] for result in results]
    else:
        texts = [*left, *right]
        inputs = [_encoded(session, one, None, f"texts[{at}]", options) for at, one in enumerate(texts)]
        requests = _requests(session, inputs, options._replace(normalize=True))
        results = _results(session, requests, options)
        vectors = [floats(result.numbers) for result in results]
        scores = cosines(vectors[: len(left)], vectors[len(left) :])
        requests = requests[len(left) :]
    return [
        ScoringRequestOutput(request.request_id, text, request.token_ids, ScoringOutput(value))
        for request, (_, text), value in zip(requests, pairs, scores, strict=True)
    ]


def _texts(given: object, param: str) -> list[str]:
    """One text or several, at least one."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(one, str) for one in texts):
        raise InvalidRequest(f"{param}: give a text or a list of texts, at least one", param=param)
    for at, one in enumerate(texts):
        if not checked_text(one, param, f"{param}[{at}]"):
            raise InvalidRequest(f"{param}[{at}]: must not be empty", param=param)
    return list(texts)


def _kept(session: Session, options: Options) -> int | None:
    window = session.client.info.max_model_len
    return window if options.truncate == -1 else options.truncate


def _prompt(session: Session, given: str | Sequence[int], param: str, options: Options) -> Encoded:
    if isinstance(given, str):
        return _encoded(session, given, None, param, options)
    return Encoded(tuple(given[: _kept(session, options)]), ())


def _encoded(session: Session, first: str, second: str | None, param: str, options: Options) -> Encoded:
    window = session.client.info.max_model_len
    return session.text.encode_input(first, second, window=window, kept=_kept(session, options), param=param)


def _requests(session: Session, inputs: Sequence[Encoded], options: Options) -> list[PoolRequest]:
    """All known to be valid."""
    name = session.next_name()
    requests = [
        PoolRequest(
            request_id=f"{name}-{at}",
            token_ids=one.token_ids,
            token_types=one.token_types if any(one.token_types) else (),
            dimensions=options.dimensions,
            normalize=options.normalize,
            sigmoid=options.sigmoid,
            priority=options.priority,
        )
        for at, one in enumerate(inputs)
    ]
    for request in requests:
        check_pool_request(request, session.client.info)
    return requests


def _results(session: Session, requests: Sequence[PoolRequest], options: Options) -> list[PoolResult]:
    from ostinato.runtime.progress import generate_progress

    with generate_progress(len(requests), show=options.progress) as advance:
        return session.run(_run(session, requests, advance))


async def _run(
    session: Session, requests: Sequence[PoolRequest], advance: Callable[[int, int], None]
) -> list[PoolResult]:
    """Together; those beyond what the engine would queue wait here. One failure ends all of them."""

    async def one(request: PoolRequest) -> PoolResult:
        async with session.room:
            (result,) = await session.client.pool([request])
        advance(1, 0)
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
