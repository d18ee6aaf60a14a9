"""The rules that a request must meet before it may run, given the loaded model."""

from __future__ import annotations

import math

from ostinato.errors import ContextTooLong, InvalidRequest
from ostinato.runtime.messages import EngineInfo, GenerateRequest

MAX_LOGIT_BIAS = 100.0  # OpenAI's own limit


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise InvalidRequest or ContextTooLong for what this model cannot run.

    `max_tokens` past the window is no error: it is an upper bound, and the answer ends with `length`.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
    if len(prompt) >= info.max_model_len:
        raise ContextTooLong(
            f"the prompt has {len(prompt)} tokens: the context window is {info.max_model_len} tokens and the "
            f"answer needs at least one of them; shorten the prompt to {info.max_model_len - 1} tokens",
            param="prompt",
        )
    _check_ids(prompt, "prompt", info.vocab_size)
    _check_ids(sampling.stop_token_ids, "stop_token_ids", info.vocab_size)
    if sampling.logit_bias:
        _check_ids(tuple(sampling.logit_bias), "logit_bias", info.vocab_size)
        for token_id, bias in sampling.logit_bias.items():
            if not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {bias}: must be from -100 to 100", param="logit_bias"
                )
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}: lower it",
            param="min_tokens",
        )


def _check_ids(token_ids: tuple[int, ...], param: str, vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{param} holds token id {wrong}: must be from 0 to {vocab_size - 1}", param=param
        )
