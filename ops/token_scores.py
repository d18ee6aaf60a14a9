"""Log-probability and rank of a token, and the likeliest tokens, under the model's own logits.

R rows of logits [R, V or wider], V vocabulary; n questions, `asked` int64 [3, n]: a row of the logits, a
token (-1: the one in `sampled` [R]), how many of the likeliest tokens (at most `most`).
The answer is int32 [n, 2 + 2 * most]: rank (1 + tokens with a larger logit; 0: the row has NaN, an infinite
maximum or no finite value), log-probability (float32 bits), ids of the likeliest (equal ones by id), their
log-probabilities (float32 bits).  What is past a question's number is undefined.
Rounding: float32; sums over splits of CHUNK tokens, so a row's answer does not depend on other rows.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, check_device, check_types
from ostinato.ops.launch import KERNEL_FLOATS, ceil_to_power_of_2, jit, on_device, tl

CHUNK = 4096  # tokens of a split
MOST = 32  # more of the likeliest than this come from a sort


def token_scores_reference(
    logits_RV: Tensor, sampled_R: Tensor, asked: Tensor, vocab_size: int, most: int
) -> Tensor:
    place, token, _ = asked
    token = torch.where(token < 0, sampled_R[place], token).unsqueeze(1)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    values_nV = logits_RV[place, :vocab_size].to(wide)
    logprobs_nV = values_nV.log_softmax(-1)
    rank = 1 + (values_nV > values_nV.gather(1, token)).sum(1, keepdim=True)
    rank = torch.where(values_nV.amax(1, keepdim=True).isfinite(), rank, 0).int()
    order = values_nV.sort(stable=True, dim=-1, descending=True).indices[:, :most]
    logprobs = logprobs_nV.gather(1, torch.cat([token, order], 1)).float().view(torch.int32)
    answer = rank.new_zeros(len(rank), 2 + 2 * most)
    answer[:, :1], answer[:, 1:2] = rank, logprobs[:, :1]
    answer[:, 2 : 2 + order.shape[1]] = order
    answer[:, 2 + most : 2 + most + order.shape[1]] = logprobs[:, 1:]
    return answer


@jit(do_not_specialize=["most"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton
    logits,
    sampled,
    asked,
    sums,
    above,
    likeliest,
    vocab,
    row_stride,
    most,
    CHUNK: tl.constexpr,
):
    """Of one split: maximum, sum of exponentials below it, tokens above the asked one, the likeliest."""
    split, question = tl.program_id(0), tl.program_id(1)
    S, n = tl.num_programs(0), tl.num_programs(1)
    place = tl.load(asked + question)
    token = tl.load(asked + n + question)
    wanted = tl.load(asked + 2 * n + question).to(tl.int32)
    if token < 0:
        token = tl.load(sampled + place)
    row = logits + place * row_stride
    chosen = tl.load(row + token).to(tl.float32)
    at = split * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("inf"), values)  # NaN is as bad as infinity
    values = tl.where(values == 0, 0.0, values)  # no -0.0
    top = tl.max(values, 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    place = question * S + split
    tl.store(sums + place, top)
    tl.store(sums + n * S + place, tl.sum(tl.exp(values - shift), 0))
    tl.store(above + place, tl.sum((values > chosen).to(tl.int32), 0))
    bits = values.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (0x7FFFFFFF - at)
    lowest = -9223372036854775807
    keys = tl.where(at < vocab, keys, lowest)
    for index in range(0, wanted):
        best = tl.max(keys, 0)
        tl.store(likeliest + place.to(tl.int64) * most + index, best)
        keys = tl.where(keys == best, lowest, keys)


@jit(do_not_specialize=["most"])
def _combine(  # type: ignore[no-untyped-def]  # Triton
    logits,
    sampled,
    asked,
    sums,
    above,
    likeliest,
    answer,
    row_stride,
    most,
    S,
    S_PAD: tl.constexpr,
    MOST: tl.constexpr,
):
    """Of one question: the answer from all splits."""
    question, n = tl.program_id(0), tl.num_programs(0)
    place = tl.load(asked + question)
    token = tl.load(asked + n + question)
    wanted = tl.load(asked + 2 * n + question).to(tl.int32)
    if token < 0:
        token = tl.load(sampled + place)
    chosen = tl.load(logits + place * row_stride + token).to(tl.float32)
    split = tl.arange(0, S_PAD)
    there = split < S
    tops = tl.load(sums + question * S + split, mask=there, other=float("-inf"))
    parts = tl.load(sums + (n + question) * S + split, mask=there, other=0.0)
    top = tl.max(tops, 0)
    out = answer + question.to(tl.int64) * (2 + 2 * most)
    if (top == float("inf")) | (top == float("-inf")):
        tl.store(out, 0)
        return
    total = top + tl.log(tl.sum(tl.where(tops > float("-inf"), parts * tl.exp(tops - top), 0.0), 0))
    rank = 1 + tl.sum(tl.load(above + question * S + split, mask=there, other=0), 0)
    tl.store(out, rank)
    tl.store(out + 1, (chosen - total).to(tl.int32, bitcast=True))
    if wanted > 0:
        index = tl.arange(0, S_PAD * MOST)
        from_split, from_rank = index // MOST, index % MOST
        lowest = -9223372036854775807
        keys = tl.load(
            likeliest + (question.to(tl.int64) * S + from_split) * most + from_rank,
            mask=(from_split < S) & (from_rank < wanted),
            other=lowest,
        )
        for at in range(0, wanted):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, lowest, keys)
            bits = (best >> 32).to(tl.int32)
            value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(out + 2 + at, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32))
            tl.store(out + 2 + most + at, (value - total).to(tl.int32, bitcast=True))


def _check(logits_RV: Tensor, sampled_R: Tensor, asked: Tensor, vocab_size: int, most: int) -> None:
    op = "token_scores"
    check_types(op, FLOATS, logits=logits_RV)
    if logits_RV.dim() != 2 or not 1 <= vocab_size <= logits_RV.shape[1]:
        raise ValueError(
            f"{op}: logits have shape {list(logits_RV.shape)}; they must be [R, V] with V of at least "
            f"vocab_size, which is {vocab_size} and must be 1 or more"
        )
    if not 0 <= most <= vocab_size:
        raise ValueError(f"{op}: most={most}; allowed are 0 to the vocabulary's {vocab_size} tokens")
    for name, tensor, shape in (
        ("sampled", sampled_R, f"[{logits_RV.shape[0]}]"),
        ("asked", asked, "[3, n]"),
    ):
        wrong = tensor.shape != logits_RV.shape[:1] if name == "sampled" else tensor.shape[:-1] != (3,)
        if tensor.dtype != torch.int64 or wrong or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} {list(tensor.shape)}; it must be contiguous int64 {shape}"
            )
        check_device(op, "logits", logits_RV, name, tensor)


def _on_cpu(logits_RV: Tensor, sampled_R: Tensor, asked: Tensor, vocab_size: int, most: int) -> Tensor:
    _check(logits_RV, sampled_R, asked, vocab_size, most)
    return token_scores_reference(logits_RV, sampled_R, asked, vocab_size, most)


def _launch(logits_RV: Tensor, sampled_R: Tensor, asked: Tensor, vocab_size: int, most: int) -> Tensor:
    _check(logits_RV, sampled_R, asked, vocab_size, most)
    check_types("token_scores", KERNEL_FLOATS, logits=logits_RV)
    count = asked.shape[1]
    if count == 0 or most > MOST:
        return token_scores_reference(logits_RV, sampled_R, asked, vocab_size, most)
    if logits_RV.stride(1) != 1:
        raise ValueError(f"token_scores: logits have strides {logits_RV.stride()}; the last one must be 1")
    splits = -(-vocab_size // CHUNK)
    sums = logits_RV.new_empty((2, count, splits), dtype=torch.float32)
    above = asked.new_empty((count, splits), dtype=torch.int32)
    likeliest = asked.new_empty((count, splits, most))
    answer = above.new_empty((count, 2 + 2 * most))
    stride = logits_RV.stride(0)
    with on_device(logits_RV):
        given = logits_RV, sampled_R, asked, sums, above, likeliest
        _kernel[splits, count](*given, vocab_size, stride, most, CHUNK=CHUNK, num_warps=8)
        _combine[(count,)](
            *given,
            answer,
            stride,
            most,
            splits,
            S_PAD=ceil_to_power_of_2(splits),
            MOST=MOST,
            num_warps=8,
        )
    return answer


torch.library.define(
    "ostinato::token_scores",
    "(Tensor logits, Tensor sampled, Tensor asked, int vocab_size, int most) -> Tensor",
)
torch.library.impl("ostinato::token_scores", "CPU", _on_cpu)
torch.library.impl("ostinato::token_scores", "CUDA", _launch)


@torch.library.register_fake("ostinato::token_scores")
def _fake(logits_RV: Tensor, sampled_R: Tensor, asked: Tensor, vocab_size: int, most: int) -> Tensor:
    _check(logits_RV, sampled_R, asked, vocab_size, most)
    return asked.new_empty((asked.shape[1], 2 + 2 * most), dtype=torch.int32)


OP = torch.ops.ostinato.token_scores.default
