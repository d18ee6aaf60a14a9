"""The rules that an input must meet before it may run, given the loaded model."""

from __future__ import annotations

from ostinato.errors import ContextTooLong, InvalidRequest
from ostinato.graph.facts import PoolingFacts
from ostinato.runtime.messages import EngineInfo, PoolRequest
from ostinato.runtime.request_check import wrong_task


def check_pool_request(request: PoolRequest, info: EngineInfo) -> PoolingFacts:
    """Raise InvalidRequest, ContextTooLong or WrongTask; return what the model does."""
    if (pooling := info.pooling) is None:
        raise wrong_task("embed", info)
    ids, types = request.token_ids, request.token_types
    if not ids:
        raise InvalidRequest("the input is empty: give at least one token", param="input")
    check_length(len(ids), info.max_model_len, param="input")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < info.vocab_size)
        raise InvalidRequest(
            f"the input holds token id {wrong}: ids are from 0 to {info.vocab_size - 1}", param="input"
        )
    if types and (len(types) != len(ids) or min(types) < 0 or max(types) >= max(2, pooling.token_types)):
        raise InvalidRequest(
            f"token_types: {len(types)} types from {min(types)} to {max(types)} for {len(ids)} tokens; each "
            "token has one, 0 or 1",
            param="input",
        )
    if request.dimensions is not None:
        check_dimensions(request.dimensions, pooling)
    check_activation(request.sigmoid, pooling)
    return pooling


def check_length(tokens: int, window: int, *, param: str, at_least: bool = False) -> None:
    """ContextTooLong for an input over the model's window; `at_least`: `tokens` is a lower bound."""
    if tokens > window:
        count = f"at least {tokens}" if at_least else f"{tokens}"
        raise ContextTooLong(
            f"{param}: the input has {count} tokens and this model's maximum context length is {window}; "
            "shorten it, or set truncate_prompt_tokens=-1 to have its end cut off",
            param=param,
        )


def check_activation(sigmoid: bool | None, pooling: PoolingFacts) -> None:
    """InvalidRequest for a choice that only a cross-encoder has."""
    if sigmoid is not None and pooling.task != "score":
        raise InvalidRequest(
            "use_activation: this model compares vectors by their angle; leave it out", param="use_activation"
        )


def check_dimensions(dimensions: int, pooling: PoolingFacts) -> None:
    """InvalidRequest for vectors that cannot be made."""
    if pooling.task != "embed" or not 1 <= dimensions <= pooling.size:
        raise InvalidRequest(
            f"dimensions: {dimensions} is not from 1 to {pooling.size}, the length of this model's vectors",
            param="dimensions",
        )
    if pooling.matryoshka and dimensions not in (*pooling.matryoshka, pooling.size):
        allowed = ", ".join(map(str, pooling.matryoshka))
        raise InvalidRequest(
            f"dimensions: this model was trained for {allowed} and {pooling.size}; got {dimensions}",
            param="dimensions",
        )
