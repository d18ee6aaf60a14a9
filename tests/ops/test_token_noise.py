"""Exponential numbers of tokens: by the definition, their distribution, and the kernel's logarithms."""

import math

import numpy as np
import pytest
import torch

from ostinato.ops.token_noise import exponentials, mixed
from ostinato.runtime.sampling.sampling_rng import random_bits
from tests.support.op_routes import CUDA, ROUTES
from tests.support.sampling_rows import exponential, leads_of

COUNT = 1024
LEAST, MOST = 7046029254386353131, 3558559446808474027  # the bits of token 0 are all 0, all 1
# what splitmix64 gives first from state 0, by its reference implementation
SPLITMIX = (16294208416658607535, 7960286522194355700, 487617019471545679)


def test_numbers_are_those_of_the_definition_and_pinned_so_that_seeded_answers_outlive_releases():
    for bits in (0, 1, 2**63, 2**64 - 1):
        numbers = exponentials(bits, 100)
        assert numbers[[0, 17, 99]] == pytest.approx(exponentials(bits, 100, np.array([0, 17, 99])), rel=0)
    numbers = exponentials(random_bits(3, 4), 500)
    assert numbers == pytest.approx([exponential(3, 4, token) for token in range(500)], rel=1e-9)
    pinned = [-math.log1p(-((number >> 12) + 0.5) * 2.0**-52) for number in SPLITMIX]
    assert exponentials(0, 3).tolist() == pytest.approx(pinned, rel=1e-12)


def test_the_bits_at_both_ends_give_finite_numbers_above_zero(monkeypatch: pytest.MonkeyPatch):
    for ends, number in ((0, 2.0**-53), (2**64 - 1, 53 * math.log(2))):
        monkeypatch.setattr(
            "ostinato.ops.token_noise.mixed", lambda state, ends=ends: np.full_like(state, ends)
        )
        assert exponentials(1, 2).tolist() == pytest.approx([number] * 2, rel=1e-9)


def test_they_are_distributed_exponentially():
    numbers = np.concatenate([exponentials(bits, 50_000) for bits in range(4)])
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        below = (numbers < -math.log(1 - share)).mean()
        assert abs(below - share) < 5 * (share * (1 - share) / len(numbers)) ** 0.5
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / len(numbers) ** 0.5


def test_mixing_is_that_of_splitmix64():
    assert mixed(np.array([0x9E3779B97F4A7C15], np.uint64)).tolist() == [SPLITMIX[0]]


@pytest.mark.parametrize("route", ROUTES[1:])
def test_leads_of_the_kernel_are_those_of_float64(route: str):
    device = "cuda" if route == CUDA else "cpu"
    distances = torch.rand(COUNT) * 20
    for bits in (5, -(2**62) - 99, LEAST, MOST):
        leads = leads_of(distances, bits, -1.25, device)
        truth = -1.25 * distances.double().numpy() - np.log2(exponentials(bits % 2**64, COUNT))
        assert np.abs(leads.double().numpy() - truth).max() < 1e-5
    assert exponentials(LEAST % 2**64, 1) == pytest.approx([2.0**-53], rel=1e-9)
    assert exponentials(MOST % 2**64, 1) == pytest.approx([53 * math.log(2)], rel=1e-9)
