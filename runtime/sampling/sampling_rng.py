"""Random numbers without state: 64 bits per (seed, position), from which `ops/token_noise.py` makes a draw.

The generator is splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), entered at a counter
instead of stepped: a draw depends on the request's seed and the token's index and on nothing else,
so batching, preemption and chunking cannot change it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.ops.token_noise import GAMMA, mixed

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """The output function of splitmix64: a bijection on 64 bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def random_bits(seed: int, position: int) -> int:
    """64 random bits. The seed is mixed first: the streams of seeds 1, 2, 3 do not overlap in practice."""
    return mix64(seed_bits(seed) + (position + 1) * GAMMA)


def seed_bits(seed: int) -> int:
    """What `vector_bits` takes for a seed."""
    return mix64(seed + GAMMA)


def vector_bits(seeds: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """`random_bits` of each pair; seeds as `seed_bits` gives."""
    return mixed(seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))  # modulo 2**64


def bits_at(seed: int, position: int) -> int:
    """`vector_bits` of one pair, as the signed integer of the same bits."""
    value = mix64(seed + (position + 1) * GAMMA)
    return value - (value >> 63 << 64)
