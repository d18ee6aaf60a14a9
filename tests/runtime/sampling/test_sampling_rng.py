"""The counter-based generator: known values, independence of seeds and positions."""

from statistics import fmean

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.sampling.sampling_rng import bits_at, mix64, random_bits, vector_bits

GAMMA = 0x9E3779B97F4A7C15


def test_the_mixer_gives_the_published_splitmix64_sequence():
    # seed 1234567, as in the reference implementation (rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64)
    assert [mix64(1234567 + (i + 1) * GAMMA) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_numbers_are_pinned_so_that_seeded_answers_outlive_releases():
    assert [random_bits(s, p) for s, p in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 100_000))] == [
        12035550249420947055,
        12935080325729570654,
        6791897765849424158,
        5131042966077474272,
    ]


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    def number(seed, position):
        return random_bits(seed, position) * 2.0**-64

    pairs = [(0, 1, 1, 0), (0, 0, 1, 0), (7, 0, 7, 1)]
    for seed_a, at_a, seed_b, at_b in pairs:
        products = [
            (number(seed_a + 2 * k, at_a + k) - 0.5) * (number(seed_b + 2 * k, at_b + k) - 0.5)
            for k in range(10_000)
        ]
        assert abs(fmean(products)) < 5 / 12 / 100  # 5 sigma: the product's deviation is 1/12


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_bits_of_one_pair_are_those_of_the_vector(seed, position):
    vector = vector_bits(np.array([seed], np.uint64), np.array([position], np.int64))
    assert bits_at(seed, position) == vector.view(np.int64)[0]
