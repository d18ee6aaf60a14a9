"""What a step's logits mean for its requests: next tokens, and the log-probabilities that they asked for.

R rows of logits, as the plan lists them: entry by entry, prompt rows before the sampled one.  V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.runtime.messages import GenerateRequest, SamplingParams, TokenLogprob
from ostinato.runtime.sampling.logprobs import token_logprobs
from ostinato.runtime.sampling.sampler import SampledBatch, Sampler, SampleRow
from ostinato.runtime.scheduling.plan import Plan, PlanEntry
from ostinato.runtime.token_limits import NO_LIMITS, Limit


@dataclass(slots=True)
class _Open:
    params: SamplingParams
    seed: int
    tokens: Sequence[int]  # prompt and answer, the scheduler's live list
    prompt_tokens: int
    prompt_logprobs: list[TokenLogprob | None] = field(
        default_factory=lambda: [None]
    )  # the first token has none


class StepSampler:
    """Keeps what sampling needs of each live request, from `open` to `close`."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._sampler = Sampler(vocab_size, eos_token_ids)
        self._open: dict[str, _Open] = {}

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return len(self._open)

    def open(self, request: GenerateRequest, tokens: Sequence[int]) -> None:
        """A request was admitted; `tokens` is its live list of prompt and generated tokens."""
        seed = request.sampling.seed
        self._open[request.request_id] = _Open(
            request.sampling,
            secrets.randbits(63) if seed is None else seed,
            tokens,
            len(request.prompt_token_ids),
        )

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        self._open.pop(request_id, None)
        self._sampler.release(request_id)

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprob | None, ...] | None:
        """One record per prompt token, complete with the first sampled token; None if not asked for."""
        request = self._open[request_id]
        return None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)

    def sample(self, plan: Plan, logits_RV: Tensor, limits: Mapping[str, Limit] = NO_LIMITS) -> SampledBatch:
        """Tokens, errors and log-probabilities by request id, from the wanted rows of the plan's entries."""
        rows: list[SampleRow] = []
        places: list[int] = []
        errors: dict[str, str] = {}
        end = 0
        for entry in plan.entries:
            begin, end = end, end + entry.num_logit_rows
            request = self._open[entry.request_id]
            if entry.prompt_logit_rows:
                try:
                    self._score_prompt(request, entry, logits_RV[begin:end])
                except EngineError as error:
                    errors[entry.request_id] = str(error)
                    continue
            if entry.samples:
                places.append(end - 1)
                rows.append(
                    SampleRow(
                        entry.request_id,
                        request.params,
                        request.seed,
                        entry.output_index,
                        request.tokens,
                        request.prompt_tokens,
                        limits.get(entry.request_id),
                    )
                )
        if len(places) < len(logits_RV):
            logits_RV = logits_RV[torch.tensor(places, dtype=torch.int64, device=logits_RV.device)]
        batch = self._sampler.sample(logits_RV, rows)
        batch.errors.update(errors)
        return batch

    def _score_prompt(self, request: _Open, entry: PlanEntry, logits_RV: Tensor) -> None:
        scored = entry.prompt_logit_rows
        following = request.tokens[entry.start + scored.start + 1 : entry.start + scored.stop + 1]
        num_top = request.params.prompt_logprobs or 0
        request.prompt_logprobs += token_logprobs(
            logits_RV[: len(scored), : self._sampler.vocab_size], following, [num_top] * len(scored)
        )
