"""What `LLM` returns. Names follow vLLM's, so that scripts move over."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.runtime.messages import FinishReason, TokenLogprob


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. From `LLM.stream` it holds what is new since the one before."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # all that were generated, also what stopped it and what a stop string cut
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token; None: not asked for
    finish_reason: FinishReason | None = None
    error: str | None = None  # why, when finish_reason is `error`


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one input."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One input of `LLM.embed` and its vector."""

    request_id: str
    prompt: str | None  # None: the input was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringOutput:
    """The score of one pair."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """One pair of `LLM.score`, named by its document, and its score."""

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...]  # of the pair; of the document alone where vectors are compared
    outputs: ScoringOutput


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its `n` answers."""

    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0  # prompt tokens of the first answer that came from the prefix cache
