"""One token per row of logits: greedy, or drawn after temperature, min_p, top_k and top_p.  No host wait.

R rows of logits [R, V or wider], V vocabulary; `rows` says how each is sampled (`sample_rows.py`, which also
has bias and penalties).  Results: tokens int64 [R], status int32 [R] (OK, BAD_LOGITS, NONE_ALLOWED; token 0
where it is not OK) and, at each row's slot, last_tokens int64 [N].  An IDLE row gives token 0 and no slot.

Meaning.  Tokens are ordered by their distance from the best logit (best - logit, in float32), equal ones by
id.  A token's weight is floor(2**44 * exp2(scale * distance)), an integer, so sums are exact in any order: a
row's result depends on no other row, on no grid, and on no order of additions.  Of the tokens within `limit`
(min_p) top_k takes the first k, top_p of these the fewest whose weights reach floor(top_p * their sum).  Of
what is left, with weights before rounding, the token is drawn that arrives first (token_noise.py).
Against the CPU sampler: arrivals have relative errors below 2**-17 here (scores of up to 64 in float32),
2**-22 there, so the tokens are equal unless two arrive that close together, once in 100 000 draws, or a
filter's cut lies that near to its threshold.

Kernels (S splits of a row).  1 (R*S): best logit of each split.  2, 3 (R*S), where top_k or top_p is asked
for: weights and counts up to E thresholds, then up to E more inside the bin where the cut must be.  4 (R*S):
who arrives first of the tokens better than that bin, and the tokens of the bin, in the order of ids.  5 (R):
finds the cut among these (or in the whole row, when they are very many) and who arrives first.  Greedy rows
take part in 1 and 5 only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, check_device, check_types
from ostinato.ops.launch import KERNEL_FLOATS, ceil_to_power_of_2, has_pdl, jit, on_device, tl
from ostinato.ops.sample_cut import bins_kernel, collect_kernel, draw, int_field, total_at
from ostinato.ops.sample_rows import (
    FRACTION_BITS,
    IDLE,
    RANDOM,
    WORDS,
    adjusted,
    adjusted_reference,
    count_reference,
    row_fields,
)
from ostinato.ops.token_noise import exponentials

OK, BAD_LOGITS, NONE_ALLOWED = 0, 1, 2
_UNSIGNED = (1 << 64) - 1


class Config(NamedTuple):
    """How a launch splits its work; results do not depend on it."""

    chunk: int  # tokens of a split
    num_warps: int
    edges: int = 16  # thresholds of one pass
    few: int = 1024  # tokens in a bin that is not divided again
    most: int = 8192  # tokens that are collected; more are searched in the row itself


CANDIDATES = (Config(1024, 4), Config(2048, 4), Config(4096, 4), Config(4096, 8), Config(8192, 8))


def sample_reference(
    logits_RV: Tensor, rows: Tensor, vocab_size: int, last_tokens: Tensor, tokens: Tensor, status: Tensor
) -> None:
    fields = row_fields(rows.numpy())
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    for row, kind in enumerate(fields["kind"].tolist()):
        tokens[row], status[row] = 0, OK
        if kind == IDLE:
            continue
        raw_V = logits_RV[row, :vocab_size].to(wide)
        logits_V = adjusted_reference(raw_V, fields, row)
        if not bool(torch.isfinite(raw_V.max())):
            status[row] = BAD_LOGITS
        elif bool(logits_V.max() == -torch.inf):
            status[row] = NONE_ALLOWED
        else:
            token = int(logits_V.argmax())
            if kind == RANDOM:
                values = {name: field[row].item() for name, field in fields.items()}
                token = _drawn(logits_V[token] - logits_V, **values)
            tokens[row] = token
            count_reference(fields, row, token)
        last_tokens[fields["slot"][row]] = tokens[row]


def _drawn(
    distance_V: Tensor, *, scale: float, limit: float, top_k: int, top_p: int, random_bits: int, **_: int
) -> int:
    weight_V = (torch.exp2(distance_V * scale) * 2.0**FRACTION_BITS).long()
    sorted_V, order_V = distance_V.sort(stable=True)
    count = int((sorted_V <= limit).sum())
    count = min(top_k or count, count)
    sums = weight_V[order_V[:count]].cumsum(0)
    if top_p:
        needed = max((top_p & _UNSIGNED) * int(sums[-1]) >> 64, 1)
        count = int((sums < needed).sum()) + 1
    kept = order_V[:count].sort().values
    arrival = torch.from_numpy(exponentials(random_bits & _UNSIGNED, len(distance_V), kept.numpy())).log2()
    return int(kept[(distance_V[kept] * scale - arrival).argmax()])


@jit
def _best_kernel(  # type: ignore[no-untyped-def]  # Triton
    logits,
    rows,
    best,
    best_id,
    counts,
    weights,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best adjusted logit of a split, its lowest id, best logit of the model; clears the row's totals."""
    split, row = tl.program_id(0), tl.program_id(1)
    S, R = tl.num_programs(0), tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kind = int_field(rows, R, row, 0)
    if kind == 0:
        return
    logits += row.to(tl.int64) * row_stride
    place = row * S + split
    addresses = tl.load(rows + 2 * R + row) | tl.load(rows + 3 * R + row) | tl.load(rows + 4 * R + row)
    if addresses == 0:
        at = split * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)  # NaN is as bad as infinity
        top = tl.max(values, 0)
        tl.store(best + place, top)
        tl.store(best + R * S + place, top)
        tl.store(best_id + place, tl.min(tl.where(values == top, at, 0x7FFFFFFF), 0))
    else:  # in blocks, for registers that few rows need shall not cost the others occupancy
        raws = tl.full([BLOCK], float("-inf"), tl.float32)
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        ids = split * CHUNK + tl.arange(0, BLOCK)
        for start in range(0, CHUNK, BLOCK):
            at = split * CHUNK + start + tl.arange(0, BLOCK)
            live = at < vocab
            values = tl.load(logits + at, mask=live, other=float("-inf")).to(tl.float32)
            values = tl.where(values != values, float("inf"), values)
            raws = tl.maximum(raws, values)
            values = tl.where(values == float("inf"), 0.0, values)  # the row is lost; no -inf + inf
            values = adjusted(values, rows, R, row, at, live)
            ids = tl.where(values > tops, at, ids)
            tops = tl.maximum(tops, values)
        top = tl.max(tops, 0)
        tl.store(best + place, top)
        tl.store(best + R * S + place, tl.max(raws, 0))
        tl.store(best_id + place, tl.min(tl.where(tops == top, ids, 0x7FFFFFFF), 0))
    if (kind == 2) & (split == 0):
        edge = tl.arange(0, E)
        for part in tl.static_range(2):
            tl.store(counts + total_at(part, row, R, E) + edge, tl.zeros([E], tl.int32))
            tl.store(weights + total_at(part, row, R, E) + edge, tl.zeros([E], tl.int64))


@jit(do_not_specialize=["S", "most"])
def _finish_kernel(  # type: ignore[no-untyped-def]  # Triton
    logits,
    rows,
    best,
    counts,
    weights,
    first,
    first_id,
    best_id,
    found,
    last_tokens,
    tokens,
    status,
    vocab,
    row_stride,
    S,
    most,
    S_PAD: tl.constexpr,
    E: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Token and status of a row."""
    row = tl.program_id(0)
    R = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kind = int_field(rows, R, row, 0)
    if kind == 0:
        tl.store(tokens + row, 0)
        tl.store(status + row, 0)
        return
    split = tl.arange(0, S_PAD)
    least = float("-inf")
    tops = tl.load(best + row * S + split, mask=split < S, other=least)
    top = tl.max(tops, 0)
    raw = tl.max(tl.load(best + (R + row) * S + split, mask=split < S, other=least), 0)
    state = 0
    if top == least:
        state = 2
    if (raw == least) | (raw == float("inf")):
        state = 1
    token = 0
    if state == 0:
        ids = tl.load(best_id + row * S + split, mask=split < S, other=0x7FFFFFFF)
        token = tl.min(tl.where(tops == top, ids, 0x7FFFFFFF), 0)
        if kind == 2:
            token = draw(
                logits + row.to(tl.int64) * row_stride, rows, counts, weights, first, first_id, found, top,
                vocab, R, S, row, most, S_PAD, E, FEW, BLOCK,
            )  # fmt: skip
        answer = tl.load(rows + 3 * R + row)
        if answer != 0:
            at = answer.to(tl.pointer_type(tl.int32)) + token
            tl.store(at, tl.load(at) + 2)
    tl.store(tokens + row, token)
    tl.store(status + row, state)
    tl.store(last_tokens + int_field(rows, R, row, 1), token)


def _check(
    logits_RV: Tensor, rows: Tensor, vocab_size: int, last_tokens: Tensor, tokens: Tensor, status: Tensor
) -> None:
    if logits_RV.dim() != 2 or logits_RV.shape[1] < vocab_size or vocab_size < 1:
        raise ValueError(
            f"sample: logits have shape {list(logits_RV.shape)}; they must be [R, V] with V of at least "
            f"vocab_size, which is {vocab_size} and must be 1 or more"
        )
    check_types("sample", FLOATS, logits=logits_RV)
    num_rows = logits_RV.shape[0]
    for name, tensor, dtype, length in (
        ("rows", rows, torch.int64, WORDS * num_rows),
        ("last_tokens", last_tokens, torch.int64, None),
        ("tokens", tokens, torch.int64, num_rows),
        ("status", status, torch.int32, num_rows),
    ):
        if tensor.dtype != dtype or tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
            wanted = "N" if length is None else length
            raise ValueError(
                f"sample: {name} is {tensor.dtype} {list(tensor.shape)}; for {num_rows} rows of logits it "
                f"must be {dtype} [{wanted}]"
            )
        check_device("sample", "logits", logits_RV, name, tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"sample: {name} has stride {tensor.stride(0)}; it must be contiguous")


def _on_cpu(
    logits_RV: Tensor, rows: Tensor, vocab_size: int, last_tokens: Tensor, tokens: Tensor, status: Tensor
) -> None:
    _check(logits_RV, rows, vocab_size, last_tokens, tokens, status)
    sample_reference(logits_RV, rows, vocab_size, last_tokens, tokens, status)


def _launch(
    logits_RV: Tensor, rows: Tensor, vocab_size: int, last_tokens: Tensor, tokens: Tensor, status: Tensor
) -> None:
    launch(logits_RV, rows, vocab_size, last_tokens, tokens, status)


def launch(
    logits_RV: Tensor,
    rows: Tensor,
    vocab_size: int,
    last_tokens: Tensor,
    tokens: Tensor,
    status: Tensor,
    *,
    config: Config | None = None,
) -> None:
    """The op on a GPU; `config` overrides the choice."""
    _check(logits_RV, rows, vocab_size, last_tokens, tokens, status)
    check_types("sample", KERNEL_FLOATS, logits=logits_RV)
    num_rows = logits_RV.shape[0]
    if num_rows == 0:
        return
    if logits_RV.stride(1) != 1:
        raise ValueError(f"sample: logits have strides {logits_RV.stride()}; the last one must be 1")
    config = config or _config(num_rows)
    splits = -(-vocab_size // config.chunk)
    edges, most = config.edges, config.most
    best = logits_RV.new_empty((2, num_rows, splits), dtype=torch.float32)
    best_id = rows.new_empty((num_rows, splits), dtype=torch.int32)
    weights = rows.new_empty(2 * num_rows * edges)
    counts = best_id.new_empty(2 * num_rows * (1 + splits) * edges)
    first, first_id = torch.empty_like(best[0]), torch.empty_like(best_id)
    found = counts.new_empty((2, num_rows, most))
    pdl = has_pdl(logits_RV)
    stride = logits_RV.stride(0)
    grid = splits, num_rows
    block = min(config.chunk, 128 * config.num_warps)  # where a program loops
    tiles = {"CHUNK": config.chunk, "E": edges, "PDL": pdl, "num_warps": config.num_warps, "launch_pdl": pdl}
    bins = tiles | {"S_PAD": ceil_to_power_of_2(splits), "FEW": config.few}
    sizes = vocab_size, stride
    with on_device(logits_RV):
        _best_kernel[grid](logits_RV, rows, best, best_id, counts, weights, *sizes, BLOCK=block, **tiles)
        scratch = logits_RV, rows, best, counts, weights
        bins_kernel[grid](*scratch, *sizes, SECOND=False, **bins)
        bins_kernel[grid](*scratch, *sizes, SECOND=True, **bins)
        arrivals = first, first_id
        collect_kernel[grid](*scratch, *arrivals, found, *sizes, most, **bins)
        results = last_tokens, tokens, status
        del bins["CHUNK"]
        _finish_kernel[(num_rows,)](
            *scratch, *arrivals, best_id, found, *results, *sizes, splits, most,
            BLOCK=min(config.chunk, 1024), **bins,
        )  # fmt: skip


def _config(num_rows: int) -> Config:
    """Few rows are split further, to reach all multiprocessors; thousands (prompts) get less scratch."""
    if num_rows <= 16:
        return CANDIDATES[0] if num_rows <= 4 else CANDIDATES[1]
    return CANDIDATES[3] if num_rows <= 256 else CANDIDATES[3]._replace(most=512)


torch.library.define(
    "ostinato::sample",
    "(Tensor logits, Tensor rows, int vocab_size, Tensor(a!) last_tokens, Tensor(b!) tokens, "
    "Tensor(c!) status) -> ()",
)
torch.library.impl("ostinato::sample", "CPU", _on_cpu)
torch.library.impl("ostinato::sample", "CUDA", _launch)


@torch.library.register_fake("ostinato::sample")
def _fake(
    logits_RV: Tensor, rows: Tensor, vocab_size: int, last_tokens: Tensor, tokens: Tensor, status: Tensor
) -> None:
    _check(logits_RV, rows, vocab_size, last_tokens, tokens, status)


OP = torch.ops.ostinato.sample.default
