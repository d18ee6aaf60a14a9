"""Random numbers without state: one uniform number per (seed, position).

The generator is splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), entered at a counter
instead of stepped: a token's number depends on the request's seed and the token's index and on nothing else,
so batching, preemption and chunking cannot change it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def mix64(value: int) -> int:
    """The output function of splitmix64: a bijection on 64 bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def random_bits(seed: int, position: int) -> int:
    """64 random bits. The seed is mixed first: the streams of seeds 1, 2, 3 do not overlap in practice."""
    return mix64(seed_bits(seed) + (position + 1) * _GAMMA)


def seed_bits(seed: int) -> int:
    """What `vector_bits` takes for a seed."""
    return mix64(seed + _GAMMA)


def vector_bits(seeds: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """The 53 bits of `uniform` at the top of 64, the others 0, for each pair; seeds as `seed_bits` gives."""
    value = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)  # modulo 2**64
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value >> np.uint64(11) << np.uint64(11)


def bits_at(seed: int, position: int) -> int:
    """`vector_bits` of one pair, as the signed integer of the same bits."""
    value = mix64(seed + (position + 1) * _GAMMA) >> 11 << 11
    return value - (value >> 63 << 64)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53."""
    return (random_bits(seed, position) >> 11) * 2.0**-53
