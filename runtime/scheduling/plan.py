"""What one step does (`Plan`) and what came of it (`Outcome`): ints and tuples, no torch.

A plan is complete in itself: whoever runs it needs nothing from the scheduler, except that a token id of
`PENDING` stands for the token which the step before this one samples for the same request. Only a scheduler
made with `max_in_flight` > 1 plans `PENDING`; the runner then takes the id on the device.
"""

from __future__ import annotations

from typing import NamedTuple

from ostinato.runtime.messages import FinishReason

PENDING = -1
ONE_PENDING = (PENDING,)  # the same object whenever a sequence decodes behind the step in flight


class PlanEntry(NamedTuple):
    """The share of one sequence in a step: tokens `start` to `start + len(token_ids) - 1` of its context.

    `block_ids` is the whole block table, in order. The same tuple object is given until the sequence gets
    another block, so a runner may keep what it derived from it while `is` holds.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    samples: bool  # the logits of the last row are sampled
    logits_from: int  # first row (index into token_ids) whose logits are wanted; len(token_ids): none
    output_index: int  # index of the token to be sampled among the generated ones; the sampler's position
    prompt_tokens: int  # tokens of the prompt; row i with start + i + 1 < prompt_tokens scores a prompt token

    @property
    def num_logit_rows(self) -> int:
        """Rows whose logits are wanted: `logits_from` to the last."""
        return len(self.token_ids) - self.logits_from

    @property
    def scores_prompt(self) -> bool:
        """Whether there are `prompt_logit_rows`: logits are wanted of more than the row that is sampled."""
        return self.logits_from < len(self.token_ids) - self.samples

    @property
    def prompt_logit_rows(self) -> range:
        """Rows whose logits score the next prompt token (`prompt_logprobs`); row i scores start + i + 1."""
        return range(self.logits_from, min(len(self.token_ids), self.prompt_tokens - 1 - self.start))


class Plan(NamedTuple):
    """One step: sequences that decode first, then those that prefill. Never empty."""

    step: int  # counts from 1
    entries: tuple[PlanEntry, ...]
    num_tokens: int


class Outcome(NamedTuple):
    """A new token of a request, or its end, or both.

    `token_id` is None when the request ended without a token (`error`). `stop_token_id` is set when an EOS
    or stop token ended it, and is then equal to `token_id`.
    """

    request_id: str
    token_id: int | None
    # `index` of the token among the generated ones, from 0; their number where token_id is None
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache; the same on every outcome
    error: str | None = None
