"""What the two attention kernels share: where keys lie, and their scores in units of log2."""

from ostinato.ops.launch import jit, tl

__all__ = [
    "capped",
    "key_places",
    "prefetch_rows",
    "score_factor",
    "score_scales",
    "shares_and_fade",
]

LOG2_E = 1.4426950408889634


@jit
def _tanh(x, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Exact to float32 if asked: 1 - 2 / (exp(2x) + 1) alone loses the leading digits of a small x."""
    if EXACT:
        z = x * x
        small = x * (1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
        e = tl.exp(-2 * tl.abs(x))
        large = (1 - e) / (1 + e)
        return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


@jit
def capped(dots, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Scores, in units of log2 once multiplied by `score_factor`; `scale` as `score_scales` gives it."""
    if SOFTCAP:
        return _tanh(dots * scale, EXACT)
    return dots


@jit
def score_factor(scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    if SOFTCAP:
        return softcap
    return scale


@jit
def shares_and_fade(scores, top, new_top, factor, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """exp2 of the scores less `new_top`, and what sums over the scores up to `top` must be multiplied by.

    Where no key is visible yet, the top is -inf and the shares are 0.
    """
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2((top - base) * factor)
    if EXACT:
        return tl.exp2((scores - base[:, None]) * factor), fade
    return tl.exp2(scores * factor - (base * factor)[:, None]), fade  # one multiply-add per score


@jit
def key_places(  # type: ignore[no-untyped-def]  # Triton
    table, start, last, B: tl.constexpr, BLOCK_N: tl.constexpr, IS_GPU: tl.constexpr
):
    """(block, place in it) of the keys from `start` on; past key `last`, a place in the last one's block.

    `start` is the first key of a block, or a multiple of BLOCK_N after it. A plain load of what other loads
    need would become a step of the loop's pipeline, and take one of the buffers that K and V should have;
    table entries are few and nearly always in L1.
    """
    row = tl.arange(0, BLOCK_N)
    if BLOCK_N % B == 0:
        column, place = start // B + row // B, row % B  # the place is the same in every step
    elif B % BLOCK_N == 0:
        column, place = start // B + row * 0, start % B + row
    else:
        column, place = (start + row) // B, (start + row) % B
    at = table + tl.minimum(column, last // B)
    if IS_GPU:
        block = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        block = tl.load(at)
    return block.to(tl.int64), place


@jit
def prefetch_rows(at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Ask L2 for WIDTH values of the rows at `at`, one request per line of 128 bytes."""
    LINE: tl.constexpr = min(1024 // at.dtype.element_ty.primitive_bitwidth, BLOCK)
    line = tl.minimum(tl.arange(0, BLOCK // LINE) * LINE, WIDTH - 1)
    address = (at[:, None] + line[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """(scale, softcap) as `capped` takes them."""
    return (scale / softcap, softcap * LOG2_E) if softcap else (scale * LOG2_E, 0.0)
