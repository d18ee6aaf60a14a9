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
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{field}: {token} is not in the vocabulary, ids are 0 to {vocab_size - 1}", param=field
                )
    _check_words(params, vocab_size)
    _check_thoughts(params, vocab_size)
    if params.logprob_token_ids and params.logprobs != 0:
        raise InvalidRequest(
            f"logprob_token_ids: needs logprobs=0, since they take the place of the likeliest tokens; got "
            f"logprobs={params.logprobs}",
            param="logprob_token_ids",
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


def _check_thoughts(params: SamplingParams, vocab_size: int) -> None:
    thoughts = params.thoughts
    if thoughts is None:
        return
    if thoughts.begun is not None and thoughts.begun >= len(thoughts.blocks):
        raise InvalidRequest(
            f"thoughts.begun: {thoughts.begun}, there are {len(thoughts.blocks)} blocks", param="thoughts"
        )
    for token in (token for block in thoughts.blocks for token in block.closing):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"thoughts: {token} is not in the vocabulary, ids are 0 to {vocab_size - 1}", param="thoughts"
            )


def _check_words(params: SamplingParams, vocab_size: int) -> None:
    if params.bad_words and not params.bad_word_ids:
        raise InvalidRequest(
            "bad_words: an engine knows no text; give bad_word_ids, the tokens of each word",
            param="bad_words",
        )
    for word in params.bad_word_ids:
        if not word or not all(0 <= token < vocab_size for token in word):
            raise InvalidRequest(
                f"bad_word_ids: {word!r:.80} must be one or more ids from 0 to {vocab_size - 1}",
                param="bad_word_ids",
            )
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    forced = {token for token, bias in params.logit_bias.items() if bias >= 100}
    never = {word[0] for word in params.bad_word_ids if len(word) == 1}
    never |= {token for token, bias in params.logit_bias.items() if bias <= -100}
    if not (set(allowed) & forced if forced else set(allowed)) - never:
        raise InvalidRequest(
            "allowed_token_ids: logit_bias and bad_words leave none of them; allow at least one more",
            param="allowed_token_ids",
        )
