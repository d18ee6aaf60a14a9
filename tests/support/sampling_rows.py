"""Rows for the sampling op, and what a token must be by the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops.launch import jit, tl
from ostinato.ops.sample_rows import WORDS
from ostinato.ops.token_noise import GAMMA, lead
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.sampling.device_sampler import ChosenRows, DeviceSampler
from ostinato.runtime.sampling.sampling_rng import mix64, random_bits

FILTERS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 2.0, "min_p": 0.02, "top_p": 0.95, "top_k": 30},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"top_k": 1},
)


class StagedRow(NamedTuple):
    """A row of logits that is sampled: its place, its request's slot, the token's index in the answer."""

    place: int
    slot: int
    position: int


def stage_rows(sampler: DeviceSampler, words: NDArray[np.int64], rows: Sequence[StagedRow]) -> ChosenRows:
    """Choose and stage them for one step."""
    num_rows = len(words) // WORDS
    chosen = sampler.choose(num_rows, [row.place for row in rows], [row.slot for row in rows])
    sampler.stage(words, chosen, [row.position for row in rows])
    return chosen


class Staged:
    """Requests r0, r1, ... of one sampler, one row each, and the outputs of the op."""

    def __init__(
        self,
        vocab_size: int,
        params: Sequence[SamplingParams | None],
        *,
        eos: frozenset[int] = frozenset(),
        position: int = 0,
        prompt: Sequence[int] = (),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """None: a row that samples nothing. Request i has seed `seed` + i."""
        self.sampler = DeviceSampler(vocab_size, eos, len(params), torch.device(device))
        rows = [
            StagedRow(at, self.sampler.open(f"r{at}", p, seed + at, prompt), position)
            for at, p in enumerate(params)
            if p is not None
        ]
        words = np.full(self.sampler.staged_words(len(params)), -1, np.int64)
        stage_rows(self.sampler, words, rows)
        self.rows = torch.from_numpy(words).to(device)
        self.tokens = torch.full((len(params),), -7, device=device)
        self.status = torch.full((len(params),), -7, dtype=torch.int32, device=device)
        self.last_tokens = torch.full((len(params),), -7, device=device)

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.last_tokens, self.tokens, self.status


@jit
def _leads(keys, bits, out, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    at = tl.arange(0, BLOCK)
    tl.store(out + at, lead(tl.load(keys + at), at, tl.load(bits), scale))


def leads_of(distance_V: Tensor, bits: int, scale: float, device: str) -> Tensor:
    """Leads of tokens as the kernel computes them, on the CPU; V is a power of 2, `bits` signed."""
    out_V = torch.empty(len(distance_V), device=device)
    keys_V = distance_V.view(torch.int32).to(device)
    held = torch.tensor([bits], device=device)
    _leads[(1,)](keys_V, held, out_V, scale, BLOCK=len(distance_V))
    return out_V.cpu()


def settings(**sampling: object) -> SamplingParams:
    return SamplingParams.model_validate(sampling)


def assert_drawn_right(
    logits_V: Tensor, params: SamplingParams, seed: int, position: int, token: int
) -> None:
    """The token arrives first by the float64 distribution, up to rounding by 2**-16."""
    probs = torch.softmax((logits_V.double() - logits_V.double().max()) / params.temperature, 0)
    values, order = probs.sort(descending=True, stable=True)
    count = int((values >= params.min_p * values[0]).sum())
    if params.top_k > 0:
        count = min(count, params.top_k)
    sums = values[:count].cumsum(0)
    if params.top_p < 1:
        count = int((sums < params.top_p * sums[-1]).sum()) + 1
    kept = torch.zeros_like(probs)
    kept[order[:count]] = values[:count]
    assert kept[token] > 0, f"token {token} is filtered out"
    arrivals = torch.tensor([exponential(seed, position, at) for at in range(len(probs))]).double() / kept
    assert arrivals[token] <= arrivals.min() * (1 + 2.0**-16), (int(arrivals.argmin()), arrivals[token])


def exponential(seed: int, position: int, token: int) -> float:
    """The number of a token, by the definition in Python's integers."""
    bits = mix64(random_bits(seed, position) + (token + 1) * GAMMA) >> 12
    return -math.log1p(-(bits + 0.5) * 2.0**-52)
