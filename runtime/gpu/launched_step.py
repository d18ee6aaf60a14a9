"""The requests of a step on a GPU, and what comes of them once the device is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ostinato.runtime.messages import SamplingParams, TokenLogprob
from ostinato.runtime.runner import StepShape
from ostinato.runtime.sampling.device_sampler import ChosenRows, ScoredRow, Scores, sampling_error
from ostinato.runtime.sampling.sampler import SampledBatch
from ostinato.runtime.scheduling.plan import Plan, PlanEntry

NO_LOGPROBS = "the model gave NaN or infinite logits, so there are no log-probabilities"


@dataclass(slots=True)
class OpenRequest:
    """What the host keeps of a live request."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]  # prompt and answer, the scheduler's live list
    prompt_tokens: int
    slot: int = -1  # none before its first step
    error: str | None = None  # why it has no slot, and ends with the step in flight
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # the first has none


class StepRows(NamedTuple):
    """What a step does for its requests. Decode steps of the same requests share one."""

    names: tuple[str, ...]
    requests: list[OpenRequest]
    slots: NDArray[np.int64]
    places: list[int]  # row of logits of each request's last token
    chosen: ChosenRows  # those that are sampled
    has_scores: bool  # log-probabilities are asked for
    shape: StepShape
    openings: int  # `GpuBackend._openings` when this was made
    samples: Sequence[bool]  # of each request
    errors: Mapping[str, str]  # requests that end with this step, and why


def scored_rows(entries: Sequence[PlanEntry], rows: StepRows) -> list[ScoredRow]:
    """Rows with log-probabilities: of the prompt, entry by entry, then the sampled one."""
    scored = []
    for request, entry, place in zip(rows.requests, entries, rows.places, strict=True):
        prompt = entry.prompt_logit_rows
        if prompt:
            first = place + 1 - entry.num_logit_rows
            for at, row in enumerate(prompt):
                following = request.tokens[entry.start + row + 1]
                scored.append(ScoredRow(first + at, following, request.params.prompt_logprobs or 0))
        if entry.samples and request.params.logprobs is not None and entry.request_id not in rows.errors:
            asked = request.params.logprob_token_ids
            scored.append(ScoredRow(place, None, request.params.logprobs, asked))
    return scored


class Launched:
    """A step on the device."""

    def __init__(
        self,
        plan: Plan,
        rows: StepRows,
        tokens: NDArray[np.int64],
        status: NDArray[np.int32],
        event: torch.cuda.Event,
        scores: Scores | None,
    ) -> None:
        self.plan = plan
        self._rows, self._tokens, self._status, self._event, self._scores = (
            rows,
            tokens,
            status,
            event,
            scores,
        )

    def result(self) -> SampledBatch:
        """Wait for the tokens; raises what went wrong on the device."""
        self._event.synchronize()
        tokens, rows = self._tokens.tolist(), self._rows
        is_plain = self._scores is None and not rows.errors
        if is_plain and not self._status.any():  # the rows of those that do not sample are OK
            places = rows.places
            if len(tokens) != len(places):
                tokens = [tokens[place] for place in places]
            return SampledBatch(dict(zip(rows.names, tokens, strict=True)))
        status = self._status.tolist()
        batch = SampledBatch(errors=dict(rows.errors))
        records = iter(self._scores.result() if self._scores is not None else ())
        for request, entry, place in zip(rows.requests, self.plan.entries, rows.places, strict=True):
            name = entry.request_id
            for _ in entry.prompt_logit_rows:
                record = next(records)
                request.prompt_logprobs.append(record)
                if record is None:
                    batch.errors.setdefault(name, NO_LOGPROBS)
            if not entry.samples or name in rows.errors:
                continue
            record = next(records) if request.params.logprobs is not None else None
            error = sampling_error(status[place], entry.output_index)
            if error is not None or name in batch.errors:
                batch.errors.setdefault(name, error or NO_LOGPROBS)
                continue
            batch.tokens[name] = tokens[place]
            if record is not None:
                batch.logprobs[name] = record
        return batch
