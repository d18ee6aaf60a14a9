"""From logits to tokens. R rows (one per sequence that samples), V vocabulary.

Order of things: bias, barred and allowed tokens, penalties (`penalties.py`); then argmax, or temperature,
min_p, top_k, top_p and one draw. top_p is taken of what top_k and min_p left. A temperature below
GREEDY_BELOW is greedy. A row whose token is settled takes no part in any of this.
Between equal logits the lower id goes first, in greedy, top_k and top_p alike.

Each token has a random number of its own, which depends on (seed, position, token) alone, and the one that
arrives first is drawn (`sampling_rng.py`, `ops/token_noise.py`). Every operation works on a row by itself and
in the same way whatever the other rows are, so equal logits give equal tokens in any batch; logits that are
rounded otherwise, as in a batch of another size, change a token only where two arrive almost together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops.token_noise import exponentials
from ostinato.runtime.grammar.grammar_state import barred_tokens
from ostinato.runtime.messages import OwnFault, SamplingParams, TokenLogprob
from ostinato.runtime.sampling.logprobs import token_logprobs
from ostinato.runtime.sampling.penalties import LogitAdjuster
from ostinato.runtime.sampling.sampling_check import validate_sampling
from ostinato.runtime.sampling.sampling_rng import random_bits
from ostinato.runtime.token_limits import Limit

__all__ = ["SampleRow", "SampledBatch", "Sampler", "validate_sampling"]

GREEDY_BELOW = 1e-5
FEW_KEPT = 4  # if less than 1/4 of the tokens are kept, numbers are drawn for these alone
CHUNK_ROWS = 64  # bounds the float32 copies to a few times 64 * vocabulary * 4 bytes
NUCLEUS_TRIES = (64, 1024)  # most nuclei are small: look at so many best tokens before sorting more
NONE_ALLOWED = OwnFault(
    "logit_bias, min_tokens, allowed_token_ids, bad_words and the grammar together forbid every token; "
    "allow at least one"
)


def bad_logits(position: int) -> str:
    """The error of a request whose row of logits cannot be used."""
    return f"the model gave NaN or infinite logits for generated token {position}"


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose token a row decides. `tokens`: prompt and answer, the live list; read for penalties only."""

    request_id: str
    params: SamplingParams
    seed: int
    position: int  # index of the token among the generated ones
    tokens: Sequence[int]
    prompt_tokens: int
    limit: Limit | None = None  # tokens that may come, or the one that must


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """By request id: a token, or an error (NaN logits, all forbidden); and what `logprobs` asked for."""

    tokens: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)


class Sampler:
    """Draws tokens; keeps the penalty state of a request until `release`."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Columns of the logits past `vocab_size` are padding. `eos_token_ids`: barred for `min_tokens`."""
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._adjusters: dict[str, LogitAdjuster] = {}

    @property
    def num_requests(self) -> int:
        """Requests whose state is kept."""
        return len(self._adjusters)

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self._adjusters.pop(request_id, None)

    def sample(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> SampledBatch:
        """One token per row. Logits are float32 or bfloat16 and are not changed.

        A row with NaN, an infinite maximum or no possible token ends in `errors`; the others are unaffected.
        Rows that are plainly greedy cost one maximum.
        """
        batch = SampledBatch()
        if not rows:
            return batch
        logits_RV = logits_RV[:, : self.vocab_size]
        best_R, ids_R = logits_RV.max(dim=-1)  # a NaN anywhere in the row comes out as the maximum
        usable = torch.isfinite(best_R).tolist()  # waits for the device
        tokens: list[int | None] = ids_R.tolist()
        others: list[int] = []
        for index, row in enumerate(rows):
            if not usable[index]:
                tokens[index] = None
                batch.errors[row.request_id] = bad_logits(row.position)
            elif isinstance(row.limit, int):
                tokens[index] = row.limit
            elif (
                row.params.temperature >= GREEDY_BELOW
                or row.limit is not None
                or not self._adjuster(row).is_idle(row.position)
            ):
                others.append(index)
        for at in range(0, len(others), CHUNK_ROWS):
            chunk = others[at : at + CHUNK_ROWS]
            for index, token in zip(chunk, self._sample_chunk(logits_RV, rows, chunk), strict=True):
                tokens[index] = token
                if token is None:
                    batch.errors[rows[index].request_id] = NONE_ALLOWED
        batch.tokens.update((row.request_id, t) for row, t in zip(rows, tokens, strict=True) if t is not None)
        self._add_logprobs(logits_RV, rows, batch)
        return batch

    def _adjuster(self, row: SampleRow) -> LogitAdjuster:
        known = self._adjusters.get(row.request_id)
        if known is None or known.tokens is not row.tokens or known.params is not row.params:
            known = LogitAdjuster(
                row.params,
                row.tokens,
                row.prompt_tokens,
                eos_token_ids=self._eos_token_ids,
                vocab_size=self.vocab_size,
            )
            self._adjusters[row.request_id] = known
        return known

    def _sample_chunk(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], chunk: list[int]
    ) -> list[int | None]:
        x_RV = logits_RV[torch.tensor(chunk, device=logits_RV.device)].float()
        for x_V, index in zip(x_RV, chunk, strict=True):
            adjuster = self._adjuster(rows[index])
            if not adjuster.is_idle(rows[index].position):
                adjuster.adjust(x_V, rows[index].position)
            if not isinstance(mask := rows[index].limit, int | None):
                x_V.masked_fill_(torch.from_numpy(barred_tokens(mask, len(x_V))), -torch.inf)
        best_R, ids_R = x_RV.max(dim=-1)
        tokens: list[int | None] = ids_R.tolist()
        possible = best_R.isfinite().tolist()  # not NaN, not barred altogether, not overflowed
        drawn: list[int] = []
        for at, index in enumerate(chunk):
            if not possible[at]:
                tokens[at] = None
            elif rows[index].params.temperature >= GREEDY_BELOW:
                drawn.append(at)
        if drawn:
            if len(drawn) < len(chunk):
                at_R = torch.tensor(drawn, device=x_RV.device)
                x_RV, best_R = x_RV[at_R], best_R[at_R]
            drawn_rows = [rows[chunk[at]] for at in drawn]
            probs_RV = filtered_probs(x_RV - best_R.unsqueeze(1), [row.params for row in drawn_rows])
            bits = [random_bits(row.seed, row.position) for row in drawn_rows]
            for at, token in zip(drawn, draw(probs_RV, bits), strict=True):
                tokens[at] = token
        return tokens

    def _add_logprobs(self, logits_RV: Tensor, rows: Sequence[SampleRow], batch: SampledBatch) -> None:
        wanted = [
            (index, row.request_id, row.params.logprobs, row.params.logprob_token_ids)
            for index, row in enumerate(rows)
            if row.params.logprobs is not None and row.request_id in batch.tokens
        ]
        if not wanted:
            return
        indices, ids, num_top, asked = zip(*wanted, strict=True)
        logits_RV = logits_RV[torch.tensor(indices, device=logits_RV.device)]
        records = token_logprobs(logits_RV, [batch.tokens[i] for i in ids], num_top, asked)
        batch.logprobs.update(zip(ids, records, strict=True))


def filtered_probs(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after temperature, min_p, top_k and top_p; not normalised again, at least one is not 0.

    `logits_RV`: float32, each row's maximum is 0, so that a tiny temperature cannot overflow.
    """
    device = logits_RV.device
    heat_R1 = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device).unsqueeze(1)
    probs_RV = torch.softmax(logits_RV / heat_R1, dim=-1)
    if any(p.min_p > 0 for p in params):
        share_R1 = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device).unsqueeze(1)
        probs_RV.masked_fill_(probs_RV < share_R1 * probs_RV.amax(dim=-1, keepdim=True), 0.0)
    vocab = probs_RV.shape[1]
    for probs_V, p in zip(probs_RV, params, strict=True):
        top_k = p.top_k if 0 < p.top_k < vocab else vocab
        if top_k < vocab or p.top_p < 1.0:
            _cut_tail(probs_V, top_k, p.top_p)
    return probs_RV


def draw(probs_RV: Tensor, bits: Sequence[int]) -> list[int]:
    """For each row the token that arrives first (`token_noise.py`), of equal ones the lowest."""
    return [
        _first_to_arrive(probs_V.numpy(force=True), row) for probs_V, row in zip(probs_RV, bits, strict=True)
    ]


def _first_to_arrive(probs_V: NDArray[np.float32], bits: int) -> int:
    if np.count_nonzero(probs_V) > len(probs_V) // FEW_KEPT:
        return int((probs_V / exponentials(bits, len(probs_V))).argmax())
    kept = probs_V.nonzero()[0]
    return int(kept[(probs_V[kept] / exponentials(bits, len(probs_V), kept)).argmax()])


def _cut_tail(probs_V: Tensor, top_k: int, top_p: float) -> None:
    """Zero all but the `top_k` likeliest tokens, of these all but the fewest whose sum reaches `top_p`."""
    if top_k < len(probs_V):
        values = probs_V.topk(top_k).values
        sums = values.double().cumsum(0)
        needed = top_p * float(sums[-1])
    else:
        needed = top_p * float(probs_V.sum(dtype=torch.float64))
        for most in NUCLEUS_TRIES:
            values = probs_V.topk(min(most, len(probs_V))).values
            sums = values.double().cumsum(0)
            if float(sums[-1]) >= needed:
                break
        else:  # tokens below this threshold sum to less than 1 - top_p: they cannot be needed
            least = (1.0 - top_p) * needed / (top_p * len(probs_V))
            values = probs_V[probs_V >= least].sort(descending=True).values
            sums = values.double().cumsum(0)
    keep = len(values)
    if top_p < 1.0:
        keep = min(keep, int((sums < needed).sum()) + 1)
    least_value = values[keep - 1]
    num_equal = int((values[:keep] == least_value).sum())
    equal = (probs_V == least_value).nonzero().squeeze(1)
    if len(equal) > num_equal:
        probs_V[equal[num_equal:]] = 0.0
    probs_V.masked_fill_(probs_V < least_value, 0.0)
