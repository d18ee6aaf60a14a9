"""Kernels that draw a token of a row of logits: where the filters cut, and which kept token arrives first.

What they compute is said in sample.py.  R rows, S splits of a row, E thresholds of a pass.
"""

from ostinato.ops.launch import jit, tl
from ostinato.ops.sample_rows import adjusted
from ostinato.ops.token_noise import lead

# Scratch. `weights` int64 [2, R, E]: a row's totals of pass 0 and 1; `counts` int32: the same, then each
# split's.  `best` float32 [2, R, S]: of the adjusted logits, of the model's; `best_id` int32 [R, S].
# `first` float32 [R, S] and `first_id` int32 [R, S]: who arrives first of a split's tokens that are kept
# wherever the cut is.  `found` int32 [2, R, most].


@jit
def total_at(part, row, R, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    return (part * R + row) * E


@jit
def _split_at(part, row, split, R, S, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    return 2 * R * E + ((part * R + row) * S + split) * E


@jit
def int_field(rows, R, row, field: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """A 4-byte field: 0 kind, 1 slot, 2 top_k."""
    return tl.load((rows + 5 * R).to(tl.pointer_type(tl.int32), bitcast=True) + field * R + row)


@jit
def _float_field(rows, R, row, field: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """3 scale, 4 limit."""
    return tl.load((rows + 5 * R).to(tl.pointer_type(tl.float32), bitcast=True) + field * R + row)


@jit
def _best_of_row(best, row, R, S, S_PAD: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Best adjusted logit, and whether the row can be drawn from."""
    split = tl.arange(0, S_PAD)
    least = float("-inf")
    top = tl.max(tl.load(best + row * S + split, mask=split < S, other=least), 0)
    raw = tl.max(tl.load(best + (R + row) * S + split, mask=split < S, other=least), 0)
    return top, (raw < float("inf")) & (top > least)


@jit
def _row_keys(logits, rows, R, row, top, at, vocab):  # type: ignore[no-untyped-def]  # Triton
    """Distances from the best logit as integers of the same order."""
    live = at < vocab
    values = tl.load(logits + at, mask=live, other=float("-inf")).to(tl.float32)
    values = adjusted(values, rows, R, row, at, live)
    keys = tl.maximum((top - values).to(tl.int32, bitcast=True), 0)  # -0.0 is 0
    return tl.where(live, keys, 0x7FFFFFFF)


@jit
def _weight(keys, scale):  # type: ignore[no-untyped-def]  # Triton
    keys = tl.minimum(keys, 0x7F800000)  # infinity: no token
    return (tl.exp2(keys.to(tl.float32, bitcast=True) * scale) * 17592186044416.0).to(tl.int64)


@jit
def _share(fraction, total):  # type: ignore[no-untyped-def]  # Triton
    """floor(fraction * total / 2**64), both unsigned."""
    fraction, total = fraction.to(tl.uint64, bitcast=True), total.to(tl.uint64, bitcast=True)
    return tl.umulhi(fraction, total).to(tl.int64, bitcast=True)


@jit
def _first_edge(limit, edge, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Upper edge of bin `edge` of the first pass: closer together near the best."""
    part = (edge + 1) * 1.0 / E
    keys = (limit * (part * part)).to(tl.int32, bitcast=True)
    return tl.where(edge < 0, -1, keys)


@jit
def _second_edge(low, high, edge, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    return low + ((high - low).to(tl.int64) * (edge + 1) // E).to(tl.int32)


@jit
def _pick(vector, edge, index):  # type: ignore[no-untyped-def]  # Triton
    return tl.sum(tl.where(edge == index, vector, 0), 0)


@jit
def _first_bin(counts, weights, rows, R, row, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """The bin of the first pass that holds the cut: index, keys low < . <= high, counts up to both.

    The bin of the top_k cut where top_k cuts anything, else of top_p's, else none: index E.
    """
    edge = tl.arange(0, E)
    count = tl.load(counts + total_at(0, row, R, E) + edge)
    weight = tl.load(weights + total_at(0, row, R, E) + edge)
    limit = _float_field(rows, R, row, 4)
    top_k = int_field(rows, R, row, 2)
    top_p = tl.load(rows + R + row)
    all_weight = _pick(weight, edge, E - 1)
    by_count = (top_k > 0) & (top_k < _pick(count, edge, E - 1))
    needed = tl.maximum(_share(top_p, all_weight), 1)
    index = top_k * 0 + E  # not a constant: a branch may replace it
    if by_count:
        index = tl.sum((count < top_k).to(tl.int32), 0)
    else:
        if top_p != 0:
            index = tl.sum((weight < needed).to(tl.int32), 0)
    low = _first_edge(limit, index - 1, E)
    high = _first_edge(limit, tl.minimum(index, E - 1), E)
    below = _pick(count, edge, index - 1)
    inside = tl.maximum(_pick(count, edge, index) - below, 0)
    return index, low, high, below, _pick(weight, edge, index - 1), inside, by_count, needed


@jit
def _cut_bin(  # type: ignore[no-untyped-def]  # Triton
    counts, weights, rows, R, row, E: tl.constexpr, FEW: tl.constexpr
):
    """The bin that holds the cut after both passes, and where each pass's thresholds stand.

    first, second: indices of the bins (second -1: not divided).  `both`: top_k and top_p cut. Then everything
    better than the bin is searched too, for top_p's cut may be there, and `inside` counts it.
    """
    first, low, high, below, weight_below, inside, by_count, needed = _first_bin(
        counts, weights, rows, R, row, E
    )
    top_p = tl.load(rows + R + row)
    second = first * 0 - 1
    if inside > FEW:
        edge = tl.arange(0, E)
        count = below + tl.load(counts + total_at(1, row, R, E) + edge)
        weight = weight_below + tl.load(weights + total_at(1, row, R, E) + edge)
        if by_count:
            second = tl.sum((count < int_field(rows, R, row, 2)).to(tl.int32), 0)
        else:
            second = tl.sum((weight < needed).to(tl.int32), 0)
        if second > 0:
            below = _pick(count, edge, second - 1)
            weight_below = _pick(weight, edge, second - 1)
        inside = _pick(count, edge, second) - below
        narrow = _second_edge(low, high, second - 1, E)
        high = _second_edge(low, high, second, E)
        low = narrow
    both = by_count & (top_p != 0)
    if both:
        inside += below
    return first, second, low, high, below, weight_below, inside, by_count, both, needed


@jit
def _below_of_splits(scratch, first, second, row, split, R, S, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Each split's sum below the bin."""
    at = scratch + _split_at(0, row, split, R, S, E) + first - 1
    below = tl.load(at, mask=split < tl.where(first > 0, S, 0), other=0)
    at = scratch + _split_at(1, row, split, R, S, E) + second - 1
    return below + tl.load(at, mask=split < tl.where(second > 0, S, 0), other=0)


@jit
def _upto_of_splits(scratch, first, second, row, split, R, S, E: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton
    """Each split's sum up to the end of the bin."""
    last = tl.where(second < 0, first, first - 1)
    at = scratch + _split_at(0, row, split, R, S, E) + last
    upto = tl.load(at, mask=split < tl.where(last >= 0, S, 0), other=0)
    at = scratch + _split_at(1, row, split, R, S, E) + second
    return upto + tl.load(at, mask=split < tl.where(second >= 0, S, 0), other=0)


@jit
def bins_kernel(  # type: ignore[no-untyped-def]  # Triton
    logits,
    rows,
    best,
    counts,
    weights,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    S_PAD: tl.constexpr,
    E: tl.constexpr,
    FEW: tl.constexpr,
    SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Number and weight of a split's tokens up to each threshold (of those inside the first pass's bin)."""
    split, row = tl.program_id(0), tl.program_id(1)
    S, R = tl.num_programs(0), tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if int_field(rows, R, row, 0) != 2:
        return
    top, usable = _best_of_row(best, row, R, S, S_PAD)
    if not usable:
        return
    if (int_field(rows, R, row, 2) == 0) & (tl.load(rows + R + row) == 0):
        return  # neither top_k nor top_p: nothing is cut
    limit = _float_field(rows, R, row, 4)
    low, high = -1, limit.to(tl.int32, bitcast=True)
    if SECOND:
        _, low, high, _, _, inside, _, _ = _first_bin(counts, weights, rows, R, row, E)
        if inside <= FEW:
            return
    at = split * CHUNK + tl.arange(0, CHUNK)
    keys = _row_keys(logits + row.to(tl.int64) * row_stride, rows, R, row, top, at, vocab)
    if SECOND:
        keys = tl.where(keys > low, keys, 0x7FFFFFFF)
    edge = tl.arange(0, E)
    count = tl.zeros([E], tl.int32)
    weight = tl.zeros([E], tl.int64)
    part: tl.constexpr = 1 if SECOND else 0
    nearest = tl.min(keys, 0)
    if nearest <= high:
        values = _weight(keys, _float_field(rows, R, row, 3))
        for index in range(0, E):  # not unrolled: the code would not fit the instruction cache
            threshold = _second_edge(low, high, index, E) if SECOND else _first_edge(limit, index, E)
            if nearest <= threshold:
                inside_V = keys <= threshold
                count = tl.where(edge == index, tl.sum(inside_V.to(tl.int32), 0), count)
                weight = tl.where(edge == index, tl.sum(tl.where(inside_V, values, 0), 0), weight)
        tl.atomic_add(counts + total_at(part, row, R, E) + edge, count, sem="relaxed")
        tl.atomic_add(weights + total_at(part, row, R, E) + edge, weight, sem="relaxed")
    tl.store(counts + _split_at(part, row, split, R, S, E) + edge, count)


@jit
def _first_of(scores, ids):  # type: ignore[no-untyped-def]  # Triton
    """The highest score and its lowest id."""
    top = tl.max(scores, 0)
    return top, tl.min(tl.where(scores == top, ids, 0x7FFFFFFF), 0)


@jit(do_not_specialize=["most"])
def collect_kernel(  # type: ignore[no-untyped-def]  # Triton
    logits,
    rows,
    best,
    counts,
    weights,
    first,
    first_id,
    found,
    vocab,
    row_stride,
    most,
    CHUNK: tl.constexpr,
    S_PAD: tl.constexpr,
    E: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Who arrives first of the tokens better than the bin; keys and ids of those in it, by id."""
    split, row = tl.program_id(0), tl.program_id(1)
    S, R = tl.num_programs(0), tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if int_field(rows, R, row, 0) != 2:
        return
    top, usable = _best_of_row(best, row, R, S, S_PAD)
    if not usable:
        return
    bin_1, bin_2, low, high, _, _, inside, _, both, _ = _cut_bin(counts, weights, rows, R, row, E, FEW)
    if both:
        low = -1
    at = split * CHUNK + tl.arange(0, CHUNK)
    keys = _row_keys(logits + row.to(tl.int64) * row_stride, rows, R, row, top, at, vocab)
    scores = tl.full([CHUNK], float("-inf"), tl.float32)
    if tl.min(keys, 0) <= low:
        ours = lead(keys, at, tl.load(rows + row), _float_field(rows, R, row, 3))
        scores = tl.where(keys <= low, ours, float("-inf"))
    score, token = _first_of(scores, at)
    tl.store(first + row * S + split, score)
    tl.store(first_id + row * S + split, token)
    if (inside == 0) | (inside > most):
        return
    splits = tl.arange(0, S_PAD)
    numbers = _upto_of_splits(counts, bin_1, bin_2, row, splits, R, S, E)
    if low >= 0:
        numbers -= _below_of_splits(counts, bin_1, bin_2, row, splits, R, S, E)
    if _pick(numbers, splits, split) == 0:
        return
    before = tl.sum(tl.where(splits < split, numbers, 0), 0)
    taken = (keys > low) & (keys <= high)
    place = before + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(found + row * most + place, keys, mask=taken)
    tl.store(found + (R + row) * most + place, at, mask=taken)


@jit
def _source(  # type: ignore[no-untyped-def]  # Triton
    logits, found, rows, R, row, top, at, length, in_row, most
):
    """Keys and ids of what is searched: the collected tokens, or the whole row."""
    if in_row:
        keys = _row_keys(logits, rows, R, row, top, at, length)
        ids = at
    else:
        keys = tl.load(found + row * most + at, mask=at < length, other=0x7FFFFFFF)
        ids = tl.load(found + (R + row) * most + at, mask=at < length, other=0x7FFFFFFF)
    return keys, ids


@jit
def _search(  # type: ignore[no-untyped-def]  # Triton
    logits,
    found,
    rows,
    R,
    row,
    top,
    scale,
    length,
    in_row,
    low,
    high,
    before,
    weight_before,
    base,
    weight_base,
    goal,
    most,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key of a token up to which number or weight reach `goal`; number and weight before it.

    Bisection of the keys low < key <= high, where both ends jump to keys that occur. `before`: of the keys up
    to low; `base`: of the tokens that are not among those searched.
    """
    while low + 1 < high:
        middle = low + (high - low) // 2
        count = tl.zeros([BLOCK], tl.int32)
        weight = tl.zeros([BLOCK], tl.int64)
        largest = tl.full([BLOCK], -1, tl.int32)
        smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, length, BLOCK):
            keys, _ = _source(
                logits, found, rows, R, row, top, start + tl.arange(0, BLOCK), length, in_row, most
            )
            upto = keys <= middle
            count += upto.to(tl.int32)
            weight += tl.where(upto, _weight(keys, scale), 0)
            largest = tl.maximum(largest, tl.where(upto, keys, -1))
            smallest = tl.minimum(smallest, tl.where(upto, 0x7FFFFFFF, keys))
        number = base + tl.sum(count, 0)
        sum_of = weight_base + tl.sum(weight, 0)
        reached = number >= goal if BY_COUNT else sum_of >= goal
        if reached:
            high = tl.max(largest, 0)
        else:
            low = tl.min(smallest, 0) - 1
            before = number
            weight_before = sum_of
    return high, before, weight_before


@jit
def draw(  # type: ignore[no-untyped-def]  # Triton
    logits,
    rows,
    counts,
    weights,
    first,
    first_id,
    found,
    top,
    vocab,
    R,
    S,
    row,
    most,
    S_PAD: tl.constexpr,
    E: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a random row."""
    scale = _float_field(rows, R, row, 3)
    top_k = int_field(rows, R, row, 2)
    top_p = tl.load(rows + R + row)
    bits = tl.load(rows + row)
    _, _, low, high, below, weight_below, inside, by_count, both, needed = _cut_bin(
        counts, weights, rows, R, row, E, FEW
    )
    in_row = inside > most
    length = tl.where(in_row, vocab, inside)
    base = tl.where(both | in_row, 0, below)
    weight_base = tl.where(both | in_row, 0, weight_below)
    # keys before `cut` are kept, and of those equal to it the ones up to id `last`
    cut = high
    last = 0x7FFFFFFF
    if inside > 0:
        ties = 0
        if by_count:
            cut, before, weight_before = _search(
                logits, found, rows, R, row, top, scale, length, in_row, low, high, below, weight_below,
                base, weight_base, top_k, most, True, BLOCK,
            )  # fmt: skip
            ties = top_k - before
            needed = tl.maximum(_share(top_p, weight_before + ties * _weight(cut, scale)), 1)
        if both | (not by_count):
            if by_count:
                low = -1
                below = 0
                weight_below = weight_below * 0
            cut, before, weight_before = _search(
                logits, found, rows, R, row, top, scale, length, in_row, low, cut, below, weight_below,
                base, weight_base, needed, most, False, BLOCK,
            )  # fmt: skip
            value = _weight(cut, scale)
            wanted = (needed - weight_before + value - 1) // tl.maximum(value, 1)
            ties = wanted.to(tl.int32)
        seen = 0
        last = -1
        for start in range(0, length, BLOCK):
            keys, ids = _source(
                logits, found, rows, R, row, top, start + tl.arange(0, BLOCK), length, in_row, most
            )
            equal = keys == cut
            rank = seen + tl.cumsum(equal.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(equal & (rank <= ties), ids, -1), 0))
            seen += tl.sum(equal.to(tl.int32), 0)
    # of what is kept for certain, each split's first; then of the tokens that were searched
    splits = tl.arange(0, S_PAD)
    scores = tl.load(first + row * S + splits, mask=splits < S, other=float("-inf"))
    score, token = _first_of(scores, tl.load(first_id + row * S + splits, mask=splits < S, other=0x7FFFFFFF))
    if inside > 0:
        leads = tl.full([BLOCK], float("-inf"), tl.float32)
        leaders = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, length, BLOCK):
            keys, ids = _source(
                logits, found, rows, R, row, top, start + tl.arange(0, BLOCK), length, in_row, most
            )
            kept = (keys < cut) | ((keys == cut) & (ids <= last))
            ours = tl.where(kept, lead(keys, ids, bits, scale), float("-inf"))
            leaders = tl.where(ours > leads, ids, leaders)
            leads = tl.maximum(leads, ours)
        other, other_token = _first_of(leads, leaders)
        if (other > score) | ((other == score) & (other_token < token)):
            token = other_token
    return token
