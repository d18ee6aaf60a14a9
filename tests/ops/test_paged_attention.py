import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import kv_write, paged_attention, paged_decode
from ostinato.ops.paged_attention import OP, paged_attention_reference
from tests.support.budget import assert_within_budget
from tests.support.op_cases import FREED, Heads, PagedCase, dense_attention, masked_attention, paged_case
from tests.support.op_routes import CUDA, FLOATS, INTERPRETER, ROUTES, assert_graph_replays, in_type, run

# lengths, new tokens, heads, block_tokens: prefill, chunk, decode, empty and new sequences in one call
TINY = [
    ([9, 5, 1, 0, 17], [9, 2, 1, 0, 1], Heads(6, 2, 8, 12), 4),
    ([3, 6], [1, 1], Heads(3, 1, 10, 10), 2),
    ([5], [5], Heads(2, 2, 40, 24), 16),
    ([130, 67], [2, 1], Heads(2, 1, 8, 8), 6),  # more keys than one tile of 64, of odd blocks
    ([], [], Heads(2, 1, 8, 8), 4),
]
MIXED = [513, 4096, 1, 100, 0, 2000, 64], [513, 1, 1, 0, 0, 130, 64]
DECODE = list(range(1, 1025, 4)), [1] * 256
EVERYTHING = {"window": 66, "softcap": 20.0, "with_sinks": True}
# heads, block_tokens, type, options: each is two kernels to compile, so each differs in what matters
REAL: list[tuple[Heads, int, torch.dtype, dict[str, Any]]] = [
    (Heads(32, 8, 128, 128), 16, torch.bfloat16, {}),
    (Heads(32, 8, 128, 128), 16, torch.bfloat16, {"window": 300}),
    (Heads(32, 8, 128, 128), 16, torch.bfloat16, EVERYTHING),
    (Heads(32, 8, 128, 128), 128, torch.float16, {"softcap": 20.0}),  # blocks larger than a tile
    (Heads(9, 3, 64, 64), 32, torch.bfloat16, {}),
    (Heads(9, 3, 64, 64), 16, torch.float32, {}),
    (Heads(64, 8, 64, 64), 16, torch.bfloat16, {"window": 128, "with_sinks": True}),  # gpt-oss
    (Heads(4, 4, 80, 80), 16, torch.bfloat16, {}),
    (Heads(8, 4, 256, 256), 16, torch.bfloat16, {"window": 300, "softcap": 50.0}),  # gemma 2
    (Heads(8, 1, 512, 512), 16, torch.bfloat16, {}),
    (Heads(71, 1, 64, 64), 16, torch.bfloat16, {}),
    (Heads(4, 4, 192, 128), 16, torch.bfloat16, {}),
]


def assert_right(
    route: str,
    case: PagedCase,
    *,
    scale: float = 0.3,
    window: int = 0,
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> Tensor:
    sinks = torch.linspace(-3, 3, case.q.shape[1]).to(case.q.dtype) if with_sinks else None
    args = case.args(scale=scale, window=window, softcap=softcap, sinks=sinks)
    ours = run(route, paged_attention, *args)
    assert ours.is_contiguous()
    truth = dense_attention(case, scale=scale, window=window, softcap=softcap, sinks=sinks)
    assert_within_budget(ours, truth, paged_attention_reference(*args))
    return ours


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(0, 0.0, False), (3, 0.0, False), (66, 0.0, False), (0, 2.0, False), (5, 30.0, True), (0, 0.0, True)],
)
def test_mixed_steps_match_dense_attention_within_the_budget(
    window: int, softcap: float, with_sinks: bool, dtype: torch.dtype, route: str
) -> None:
    options = {"window": window, "softcap": softcap, "with_sinks": with_sinks}
    for lengths, num_new, heads, block_tokens in TINY:
        case = paged_case(
            lengths, num_new, heads, block_tokens=block_tokens, window=window, num_padding=2, dtype=dtype
        )
        out = assert_right(route, case, scale=heads.k_size**-0.5, **options)
        assert out[sum(num_new) :].count_nonzero() == 0  # padding rows


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "block_tokens", "dtype", "options"), REAL)
def test_real_shapes_on_a_gpu_match_dense_attention_within_the_budget(
    heads: Heads, block_tokens: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    long, window = heads.q * heads.k_size > 2000, int(options.get("window", 0))
    steps = (
        [MIXED, DECODE] if long and heads.kv == 8 else [([300, 129, 70], [300, 1, 40]), ([1, 700], [1, 1])]
    )
    for lengths, num_new in steps:
        case = paged_case(
            lengths, num_new, heads, block_tokens=block_tokens, window=window, num_padding=2, dtype=dtype
        )
        out = assert_right("cuda", case, scale=heads.k_size**-0.5, **options)
        assert out[sum(num_new) :].count_nonzero() == 0
        assert torch.equal(out, assert_right("cuda", case, scale=heads.k_size**-0.5, **options))


@pytest.mark.parametrize("route", ROUTES)
def test_keys_split_over_programs_give_the_same_again_and_again(route: str) -> None:
    """Three launches: the counts of programs that arrived are back at zero after each."""
    lengths = [200, 1, 64, 65, 0] if route != CUDA else [4000, 1, 64, 65, 0]
    case = paged_case(lengths, [1, 1, 1, 1, 0], Heads(4, 2, 16, 16), num_padding=1)
    first = assert_right(route, case, with_sinks=True)
    for _ in range(2):
        assert torch.equal(assert_right(route, case, with_sinks=True), first)
    assert first[4].count_nonzero() == 0


@pytest.mark.parametrize("route", ROUTES[1:])
def test_a_few_keys_more_than_one_run_are_no_run_of_their_own(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to twice the least, one program takes all steps: bit by bit as where nothing is split."""
    monkeypatch.setattr(paged_decode, "_config", lambda _: paged_decode.DecodeConfig(16, 4, 1, 4, 4))
    for steps, is_split in ((3, False), (5, False), (7, False), (8, True), (23, True)):
        case = paged_case([16 * steps - 3, 16 * steps], [1, 1], Heads(4, 2, 16, 16))
        each = []
        for splits in (1, 4):
            monkeypatch.setattr(paged_decode, "_splits", lambda *_, n=splits: (n, 4))
            each.append(assert_right(route, case))
        assert torch.equal(*each) != is_split, steps


def test_programs_for_long_sequences_are_a_few_for_each_place_on_the_gpu() -> None:
    config = paged_decode.DecodeConfig(64, 4, 3, 16, 8)
    assert paged_decode._splits(8, 8192, config) == (16, 1)
    assert paged_decode._splits(256, 8192, config) == (4, 8)
    assert paged_decode._splits(2048, 8192, config) == (2, 8)
    assert paged_decode._splits(2048, 512, config) == (1, 8)
    assert paged_decode._splits(4097, 131072, config) == (1, 1)


@pytest.mark.parametrize("route", ROUTES)
def test_as_many_tokens_as_sequences_need_not_be_one_each(route: str) -> None:
    case = paged_case([9, 0, 70, 5], [2, 0, 1, 1], Heads(4, 2, 16, 16))
    assert_right(route, case)


@pytest.mark.parametrize("route", ROUTES)
def test_more_sequences_than_programs_are_all_answered(route: str) -> None:
    lengths = [2 + number % 5 for number in range(40)]
    assert_right(route, paged_case(lengths, [2] * 40, Heads(4, 2, 16, 16)))


def test_reference_in_float64_is_the_definition() -> None:
    lengths, num_new, heads, _ = TINY[0]
    for window, softcap in ((0, 0.0), (3, 0.0), (3, 2.0)):
        case = paged_case(lengths, num_new, heads, window=window)
        args = in_type(torch.float64, case.args(window=window, softcap=softcap))
        torch.testing.assert_close(OP(*args), dense_attention(case, window=window, softcap=softcap))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 99])
@pytest.mark.parametrize("block_tokens", [2, 4, 16])
def test_chunked_prefill_then_decode_sees_exactly_the_window(
    block_tokens: int, chunk: int, route: str
) -> None:
    """All prompt lengths advance together, so prefill and decode rows are mixed; a freed block is a trap."""
    if route == INTERPRETER and (chunk not in (3, 99) or block_tokens == 2):
        pytest.skip("the interpreter takes 20 ms a program; two chunk sizes and two block sizes are enough")
    if route == CUDA and block_tokens == 2:
        pytest.skip("nothing differs from blocks of 4 but the time to compile")
    prompts, num_decoded = ([2, 9], 3) if route == INTERPRETER else (range(1, 41), 40)
    totals = [prompt + num_decoded for prompt in prompts]
    heads, windows = Heads(4, 2, 16, 16), (4, 0) if block_tokens == 4 else (4,)
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        [torch.randn(total, count, 16, generator=draw) for total in totals]
        for count in (heads.q, heads.kv, heads.kv)
    )
    truth = {window: _every_position(q, k, v, window) for window in windows}
    width = -(-max(totals) // block_tokens)
    tables = torch.arange(len(totals) * width, dtype=torch.int32).view(len(totals), width)
    k_cache, v_cache = torch.full((2, tables.numel(), block_tokens, heads.kv, 16), float("nan"))
    done = [0] * len(totals)
    while done != totals:
        new = [
            min(chunk, prompt - at) if at < prompt else min(1, total - at)
            for prompt, at, total in zip(prompts, done, totals, strict=True)
        ]
        spans = [slice(at, at + count) for at, count in zip(done, new, strict=True)]
        position = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        row = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
        slots = tables[row, position // block_tokens].long() * block_tokens + position % block_tokens
        step_q, step_k, step_v = (
            torch.cat([x[span] for x, span in zip(xs, spans, strict=True)]) for xs in (q, k, v)
        )
        kv_write.OP(step_k, step_v, k_cache, v_cache, slots)
        starts = torch.tensor([0, *new]).cumsum(0).int()
        seq_lens = torch.tensor([span.stop for span in spans], dtype=torch.int32)
        for window in windows:
            left = tables.clone()
            if window:
                for number, span in enumerate(spans):
                    left[number, : max(0, span.start - window + 1) // block_tokens] = FREED
            out = run(
                route, paged_attention, step_q, k_cache, v_cache, left, seq_lens, starts, 0.3, window, 0.0
            )
            expected = torch.cat([t[span] for t, span in zip(truth[window], spans, strict=True)])
            torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
        done = [span.stop for span in spans]


def _every_position(q: list[Tensor], k: list[Tensor], v: list[Tensor], window: int) -> list[Tensor]:
    return [masked_attention(*qkv, 0.3, window, 0.0) for qkv in zip(q, k, v, strict=True)]


@pytest.mark.parametrize("route", ROUTES)
def test_query_10_in_a_window_of_4_sees_keys_7_to_10(route: str) -> None:
    case = paged_case([11], [1], Heads(4, 2, 16, 16))
    case.q.zero_()  # all visible keys weigh the same
    out = run(route, paged_attention, *case.args(window=4))
    expected = case.v_dense[0][7:11].mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(out[0], expected)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_scores_far_from_zero_neither_overflow_nor_vanish(route: str, dtype: torch.dtype) -> None:
    case = paged_case([9, 9], [9, 1], Heads(4, 2, 16, 16), dtype=dtype)
    case.q.mul_(100)
    assert_right(route, case, scale=4.0)
    assert_right(route, case, scale=4.0, softcap=50.0)
    assert_right(route, case, scale=1e-6, softcap=50.0)


@pytest.mark.parametrize("route", ROUTES)
def test_rows_that_seq_lens_does_not_cover_give_zeros(route: str) -> None:
    case = paged_case([3, 4, 2], [3, 1, 2], Heads(4, 2, 16, 16))
    seq_lens = torch.tensor([3, 0, 1], dtype=torch.int32)  # a padding sequence; one token too many
    out = run(route, paged_attention, *case._replace(seq_lens=seq_lens).args())
    assert out[3:5].count_nonzero() == 0
    torch.testing.assert_close(out[:3], OP(*case.args())[:3])
    torch.testing.assert_close(out[5], case.v_dense[2][0].repeat_interleave(2, 0))


@pytest.mark.parametrize("route", ROUTES)
def test_a_sequence_with_nan_leaves_the_others_alone(route: str) -> None:
    case = paged_case([5, 4], [2, 1], Heads(4, 2, 16, 16))
    clean = run(route, paged_attention, *case.args())
    case.k_cache[case.block_tables[1, 0].long()] = float("nan")
    out = run(route, paged_attention, *case.args())
    assert torch.equal(out[:2], clean[:2])


@pytest.mark.parametrize("route", ROUTES)
def test_int64_indices_strided_q_and_interleaved_planes_are_right(route: str) -> None:
    case = paged_case([9, 5, 7], [4, 1, 7], Heads(4, 2, 16, 16))
    planes = torch.stack([case.k_cache, case.v_cache], 1)  # [N, 2, B, G, D]
    strided = case._replace(
        q=torch.cat([case.q, case.q], 1)[:, 4:],
        k_cache=planes[:, 0],
        v_cache=planes[:, 1],
        block_tables=torch.cat([case.block_tables] * 2, 1).long()[:, : case.block_tables.shape[1]],
        seq_lens=case.seq_lens.long(),
        query_start=case.query_start.long(),
    )
    expected = run(route, paged_attention, *case.args())
    assert torch.equal(run(route, paged_attention, *strided.args()), expected)
    q_columns = case._replace(q=case.q.transpose(1, 2).contiguous().transpose(1, 2))
    torch.testing.assert_close(run(route, paged_attention, *q_columns.args()), expected)


def test_reserved_but_uncommitted_blocks_are_never_touched() -> None:
    """Planes are views over 1 GiB of address space of which 5 pages are mapped; another touch is a crash."""
    script = """
        import ctypes, mmap, os, sys
        import numpy as np, torch
        from ostinato.ops import kv_write, paged_attention, rope_kv_write

        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        PROT_NONE, RESERVE, GIB, PAGE = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, 1 << 30, 4096

        def plane(committed_blocks):  # [N, 4, 2, 128] float32: a block is one page
            base = libc.mmap(None, GIB, PROT_NONE, RESERVE, -1, 0)
            assert libc.mprotect(base, committed_blocks * PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
            flat = torch.frombuffer((ctypes.c_char * GIB).from_address(base), dtype=torch.float32)
            return flat.view(-1, 4, 2, 128)

        k_cache, v_cache = plane(5), plane(5)
        k, q = torch.randn(19, 2, 128), torch.randn(19, 4, 128)
        slots = torch.arange(19)
        tables = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 200000]], dtype=torch.int32)
        lens, starts = torch.tensor([19], dtype=torch.int32), torch.tensor([0, 19], dtype=torch.int32)
        table = torch.ones(19, 128)
        with np.errstate(over="ignore"):
            for route in ("OP", "_launch")[: 1 if torch.cuda.is_available() else 2]:
                getattr(kv_write, route)(k, k, k_cache, v_cache, slots)
                getattr(rope_kv_write, route)(
                    q, k, k, table, 0 * table, k_cache, v_cache, slots, None, None, 1e-6, 0.0, True, False
                )
                for window in (0, 3):
                    getattr(paged_attention, route)(
                        q, k_cache, v_cache, tables, lens, starts, 0.1, window, 0.0
                    )
                    getattr(paged_attention, route)(
                        q[:1], k_cache, v_cache, tables, lens, starts.clamp(max=1), 0.1, window, 5.0
                    )
        assert torch.equal(k_cache[:5].flatten(0, 1)[:19], k)
        sys.stdout.write("done;")
        sys.stdout.flush()
        k_cache[5, 0, 0, 0].item()  # the trap is armed
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert (process.stdout, process.returncode) == ("done;", -11), process.stderr


def test_other_shapes_and_types_are_refused_with_both_sides_named() -> None:
    case = paged_case([9, 5], [4, 1], Heads(4, 2, 16, 16))
    with pytest.raises(ValueError, match="q has 3 heads and k_cache 2; the first must be a multiple"):
        OP(*case._replace(q=case.q[:, :3]).args())
    with pytest.raises(ValueError, match=r"k_cache has shape .*: \[D\] is 8 and 16"):
        OP(*case._replace(k_cache=case.k_cache[..., :8]).args())
    with pytest.raises(ValueError, match="query_start has 2 entries for 2 seq_lens; it needs one more"):
        OP(*case._replace(query_start=case.query_start[:2]).args())
    with pytest.raises(ValueError, match=r"seq_lens has shape \[1\], block_tables .*: \[S\] is 1 and 2"):
        OP(*case._replace(seq_lens=case.seq_lens[:1]).args())
    with pytest.raises(ValueError, match=r"k_cache is torch\.float16 but q is torch\.float32"):
        OP(*case._replace(k_cache=case.k_cache.half()).args())
    with pytest.raises(ValueError, match=r"scale=0\.0; it must be positive"):
        OP(*case.args(scale=0.0))
    with pytest.raises(ValueError, match=r"sinks has shape \[3\], q \[5, 4, 16\]: \[H\] is 3 and 4"):
        OP(*case.args(sinks=torch.ones(3)))
    with pytest.raises(ValueError, match=r"window=-1, softcap=0.0; both must be positive, or 0 for none"):
        OP(*case.args(window=-1))


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    case = paged_case([9, 5], [4, 1], Heads(4, 2, 16, 8), num_padding=1)
    torch.library.opcheck(OP, tuple(case.args(window=3)))
    compiled = torch.compile(
        lambda *args: OP(*args, 0.3, 3, 0.0) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for lengths, num_new in (([9, 5], [4, 1]), ([3, 9, 6], [3, 1, 2])):
        case = paged_case(lengths, num_new, Heads(4, 2, 16, 8), window=3)
        assert torch.equal(compiled(*case[:6]), OP(*case.args(window=3)) * 2)


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    """The same bucket with other lengths: the grid is sized by shapes alone."""
    heads = Heads(32, 8, 128, 128)
    old = paged_case([900, 1, 1], [1, 1, 1], heads, block_tokens=16, num_padding=61, dtype=torch.bfloat16)
    new = paged_case([300, 500, 100], [33, 1, 30], heads, block_tokens=16, dtype=torch.bfloat16, seed=1)
    num_blocks = max(old.k_cache.shape[0], new.k_cache.shape[0])
    width = max(old.block_tables.shape[1], new.block_tables.shape[1])

    def same_size(case: PagedCase) -> PagedCase:
        k_cache, v_cache = (
            torch.cat([plane, plane.new_zeros(num_blocks - len(plane), *plane.shape[1:])])
            for plane in (case.k_cache, case.v_cache)
        )
        tables = torch.zeros(3, width, dtype=torch.int32)
        tables[:, : case.block_tables.shape[1]] = case.block_tables
        return case._replace(k_cache=k_cache, v_cache=v_cache, block_tables=tables)

    assert_graph_replays(paged_attention, same_size(old).args(), same_size(new).args())
    decode = [
        paged_case(lengths, [1] * 3, heads, block_tokens=16, dtype=torch.bfloat16, seed=seed)
        for seed, lengths in enumerate(([900, 1, 1], [300, 500, 100]))
    ]
    num_blocks = max(case.k_cache.shape[0] for case in decode)
    width = max(case.block_tables.shape[1] for case in decode)
    assert_graph_replays(paged_attention, *(same_size(case).args() for case in decode))


@pytest.mark.gpu
def test_offsets_past_2_to_31_are_right() -> None:
    heads, block_tokens = Heads(8, 8, 128, 128), 64
    case = paged_case([100], [1], heads, block_tokens=block_tokens, dtype=torch.bfloat16)
    used = case.block_tables[0, :2].long()
    num_blocks = 2**31 // (block_tokens * 8 * 128) + 4
    far = torch.zeros(num_blocks, block_tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    v_far = torch.zeros_like(far)
    far[-2:], v_far[-2:] = case.k_cache[used].cuda(), case.v_cache[used].cuda()
    tables = torch.tensor([[num_blocks - 2, num_blocks - 1]], dtype=torch.int32, device="cuda")
    near = run("cuda", paged_attention, *case.args())
    out = OP(case.q.cuda(), far, v_far, tables, case.seq_lens.cuda(), case.query_start.cuda(), 0.3, 0, 0.0)
    assert torch.equal(out.cpu(), near)
