"""Random numbers of tokens, from 64 random bits of a row: one standard exponential number E for each.

A token of weight w arrives at the time E / w, and the first to arrive is drawn: token t with probability
w[t] / sum(w) (Efraimidis, Spirakis 2006, doi:10.1016/j.ipl.2005.11.003; its logarithm is the Gumbel-max
trick). Rounding of weights decides only between two tokens that arrive at almost the same time: that they
are closer than a share d of it happens once in 1/d draws, whatever the distribution. An inverted cumulative
sum would change the token wherever the sum of all rounding errors exceeds a likely token's own share.

The bits of token t are number t of the splitmix64 sequence (Steele, Lea, Flood 2014,
doi:10.1145/2660193.2660195) whose state is the row's bits; 52 of them give u, a multiple of 2**-52 and a
half, which float64 has exactly, and E = -ln(1 - u), which is neither infinite nor 0.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ostinato.ops.launch import jit, tl

GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64, a bijection on 64 bits; `state` is overwritten."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


@lru_cache(4)
def _steps(num_tokens: int) -> NDArray[np.uint64]:
    return np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(GAMMA)  # modulo 2**64


def exponentials(bits: int, num_tokens: int, ids: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """E of tokens 0 to num_tokens - 1, or of those at `ids`; bits: unsigned."""
    steps = _steps(num_tokens)
    draws = mixed((steps if ids is None else steps[ids]) + np.uint64(bits)) >> np.uint64(12)
    return -np.log((2.0**52 - 0.5 - draws) * 2.0**-52)


@jit
def lead(keys, ids, bits, scale):  # type: ignore[no-untyped-def]  # Triton
    """log2(w / E), larger for tokens that arrive earlier. w = 2**(scale * distance), and keys its bits."""
    state = bits + (ids.to(tl.int64) + 1) * -7046029254386353131  # GAMMA as a signed number
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    state = state ^ ((state >> 31) & 0x1FFFFFFFF)
    middle = ((state >> 12) & 0xFFFFFFFFFFFFF) * 2 + 1
    u = middle.to(tl.float32) * 1.1102230246251565e-16  # 2**-53
    rest = (9007199254740992 - middle).to(tl.float32) * 1.1102230246251565e-16
    z = u / (2.0 - u)  # -ln(1 - u) = 2 artanh(z): 1 - u has lost digits of a small u
    near = 2.0 * z * (1.0 + z * z * (0.33333333 + z * z * 0.2))
    exponential = tl.where(u < 0.125, near, -tl.log(rest))
    return keys.to(tl.float32, bitcast=True) * scale - tl.log2(exponential)
