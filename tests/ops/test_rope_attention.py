"""Rotation, KV write and attention in one op equal the two ops, in one launch where that pays."""

from typing import Any

import pytest
import torch

from ostinato.ops import rope_attention
from ostinato.ops.rope_attention import OP, rope_attention_reference
from tests.support.budget import assert_within_budget
from tests.support.op_cases import Heads, paged_case, rope_case
from tests.support.op_routes import CUDA, ROUTES, assert_graph_replays, in_type, run

# name -> options of rope_case, and of the attention
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "half": ({}, {}),
    "half_norm_window": ({"norm": True}, {"window": 5}),
    "interleaved_partial_norm_softcap": (
        {"num_rotated": 4, "interleaved": True, "norm": True},
        {"softcap": 3.0},
    ),
    "partial_window": ({"num_rotated": 6}, {"window": 70}),
}
ODD = [9, 0, 70, 5], [2, 0, 1, 1]  # as many tokens as sequences, but not one each
TINY = [([70, 1, 5], [1, 1, 1]), ODD, ([9, 130], [4, 1])]
REAL = [([900, 1, 5, 64, 65], [1] * 5), ODD, ([300, 130], [40, 1])]


def case(
    lengths: list[int],
    num_new: list[int],
    heads: Heads,
    *,
    block_tokens: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    rope: dict[str, Any] | None = None,
    **attention: Any,
) -> list[Any]:
    """The arguments of the op: the cache lacks the keys of the step, and the last token is padding."""
    paged = paged_case(
        [*lengths, 0],
        [*num_new, 0],
        heads,
        block_tokens=block_tokens,
        window=attention.get("window", 0),
        num_padding=1 if sum(num_new) <= len(num_new) else 0,
        dtype=dtype,
        seed=seed,
    )
    args = rope_case(len(paged.q), heads, block_tokens=block_tokens, dtype=dtype, seed=seed, **(rope or {}))
    slots = torch.full((len(paged.q),), -1)
    for row, (length, new) in enumerate(zip(lengths, num_new, strict=True)):
        position = torch.arange(length - new, length)
        first = int(paged.query_start[row])
        block = paged.block_tables[row, position // block_tokens].long()
        slots[first : first + new] = block * block_tokens + position % block_tokens
    k_cache, v_cache = paged.k_cache.flatten(0, 1), paged.v_cache.flatten(0, 1)
    k_cache[slots[slots >= 0]], v_cache[slots[slots >= 0]] = float("nan"), float("nan")
    args[5:8] = paged.k_cache, paged.v_cache, slots
    return [*args, *paged.args(**attention)[3:]]


def results(route: str, args: list[Any]) -> list[torch.Tensor]:
    out = run(route, rope_attention, *args)
    return [out, *(plane.nan_to_num() for plane in args[5:7])]  # what was never written is NaN


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_both_planes_match_float64_within_the_budget(
    kind: str, dtype: torch.dtype, route: str
) -> None:
    rope, attention = KINDS[kind]
    if route == CUDA and dtype == torch.float32 and kind != "half":
        pytest.skip("the type changes the product alone, and its kernels take long to compile")
    steps, heads = (REAL, Heads(8, 2, 64, 64)) if route == CUDA else (TINY, Heads(4, 2, 8, 8))
    for lengths, num_new in steps:
        args = case(lengths, num_new, heads, dtype=dtype, rope=rope, scale=heads.k_size**-0.5, **attention)
        true_args, plain_args = in_type(torch.float64, args), in_type(dtype, args)
        truth = [rope_attention_reference(*true_args), *(p.nan_to_num() for p in true_args[5:7])]
        plain = [rope_attention_reference(*plain_args), *(p.nan_to_num() for p in plain_args[5:7])]
        for ours, true, simple in zip(results(route, args), truth, plain, strict=True):
            assert_within_budget(ours, true, simple)


@pytest.mark.parametrize("route", ROUTES)
def test_nan_in_a_padding_row_stays_there(route: str) -> None:
    heads = Heads(8, 2, 64, 64) if route == CUDA else Heads(4, 2, 8, 8)
    args = case([70, 1, 5], [1, 1, 1], heads, scale=0.3)
    clean = results(route, in_type(torch.float32, args))
    for part in args[:5]:
        part[3] = float("nan")
    out, k_cache, v_cache = results(route, args)
    assert torch.equal(out[:3], clean[0][:3])
    assert out[3].count_nonzero() == 0
    assert torch.equal(k_cache, clean[1])
    assert torch.equal(v_cache, clean[2])


@pytest.mark.parametrize(("tokens", "sequences", "parts"), [(32, 32, 1), (33, 33, 2), (1, 4, 1), (5, 4, 2)])
def test_few_tokens_are_one_launch_and_more_are_two(
    tokens: int, sequences: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []
    turned = torch.zeros(1)

    def turn(*_: object) -> torch.Tensor:
        launched.append(turn)
        return turned

    def attend(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert q is turned
        launched.append(attend)
        return q

    monkeypatch.setattr(rope_attention, "decode", lambda *_, **__: launched.append(rope_attention))
    monkeypatch.setattr(rope_attention.rope_kv_write, "_launch", turn)
    monkeypatch.setattr(rope_attention.paged_attention, "_launch", attend)
    new = [tokens - sequences + 1, *[1] * (sequences - 1)] if tokens >= sequences else [1, 0, 0, 0]
    args = rope_case(tokens, Heads(2, 1, 8, 8))
    rope_attention._launch(*args, *paged_case([9] * sequences, new, Heads(2, 1, 8, 8)).args()[3:])
    assert launched == ([rope_attention] if parts == 1 else [turn, attend])


def test_both_ops_check_their_part() -> None:
    args = case([9, 5], [1, 1], Heads(4, 2, 8, 8), scale=0.3)
    with pytest.raises(ValueError, match=r"rope_kv_write: k_weight has shape \[4\]"):
        OP(*args[:9], torch.ones(4), *args[10:])
    with pytest.raises(ValueError, match="paged_attention: query_start has 3 entries for 3 seq_lens"):
        OP(*args[:16], args[16][:3], *args[17:])


def test_opcheck() -> None:
    args = case([9, 5], [1, 1], Heads(4, 2, 8, 8), scale=0.3)
    args[5:7] = (plane.nan_to_num() for plane in args[5:7])
    torch.library.opcheck(OP, tuple(args))


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    heads = Heads(8, 2, 64, 64)
    old, new = (
        case(lengths, [1, 1, 1], heads, dtype=torch.bfloat16, seed=seed, scale=0.1)
        for seed, lengths in enumerate(([300, 1, 9], [297, 4, 11]))
    )
    assert old[14].shape == new[14].shape
    new[5:7] = (torch.zeros_like(plane) for plane in old[5:7])
    new[7] = old[7]
    new[14:17] = old[14], new[15], new[16]
    new[15] = old[15]
    assert_graph_replays(rope_attention, old, new)
