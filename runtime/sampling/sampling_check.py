"""What can be checked about sampling parameters only when the model is known. No torch."""

from __future__ import annotations

import math

from ostinato.errors import InvalidRequest
from ostinato.runtime.messages import SamplingParams


def validate_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest, naming the field: ids outside the vocabulary, parameters that contradict."""
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {token} is not in the vocabulary, ids are 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise InvalidRequest(
                f"logit_bias: bias {bias} of token {token} is out of range, allowed are -100 to 100",
                param="logit_bias",
            )
    if len(params.logit_bias) == vocab_size and all(bias == -100 for bias in params.logit_bias.values()):
        raise InvalidRequest("logit_bias: every token is forbidden; leave at least one", param="logit_bias")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token} is not in the vocabulary, ids are 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}; lower it",
            param="min_tokens",
        )
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise InvalidRequest(
                f"{field}={count}: the vocabulary has only {vocab_size} tokens; lower it", param=field
            )
