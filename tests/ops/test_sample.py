"""Draws of the sampling op: by the definition, by the CPU sampler, and the same on every route and grid."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ostinato.ops import sample
from ostinato.ops.sample import BAD_LOGITS, CANDIDATES, NONE_ALLOWED, OK, OP, Config
from ostinato.ops.sample_rows import WORDS, limit_of, row_fields, scale_of, top_p_of
from ostinato.runtime.sampling.sampler import Sampler, SampleRow
from tests.support.op_routes import CUDA, INTERPRETER, ROUTES
from tests.support.sampling_rows import FILTERS, Staged, assert_drawn_right, leads_of, settings

SMALL = Config(chunk=64, num_warps=1, edges=8, few=16, most=64)
TINY_BINS = Config(chunk=64, num_warps=1, edges=4, few=1, most=2)  # searches in the row itself
EIGHTHS = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125])  # exact in float32; token 2 is impossible


def sampled(
    route: str, logits: Tensor, vocab_size: int, staged: Staged, config: Config | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, status and last tokens. `config` is for kernels; a GPU's own choice stands for None."""
    if route == INTERPRETER:
        sample.launch(logits, staged.rows, vocab_size, *staged.results, config=config or SMALL)
    elif route == CUDA:
        moved = [tensor.cuda() for tensor in (staged.rows, *staged.results)]
        sample.launch(logits.cuda(), moved[0], vocab_size, *moved[1:], config=config)
        for mine, theirs in zip(staged.results, moved[1:], strict=True):
            mine.copy_(theirs)
    else:
        OP(logits, staged.rows, vocab_size, *staged.results)
    return staged.tokens.tolist(), staged.status.tolist(), staged.last_tokens.tolist()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_filter_draws_the_token_of_the_float64_distribution(route: str, dtype: torch.dtype) -> None:
    if route == CUDA and dtype == torch.float16:
        pytest.skip("five more kernels to compile, which differ from bfloat16's in a load")
    chosen = FILTERS if dtype == torch.float32 or route != INTERPRETER else FILTERS[::3]
    rows = [settings(**filters) for filters in chosen]
    logits = (torch.randn(len(rows), 120) * 2).to(dtype)
    tokens, status, last = sampled(route, logits, 120, Staged(120, rows, position=3, seed=10))
    assert status == [OK] * len(rows)
    assert last == tokens
    for row, (token, params) in enumerate(zip(tokens, rows, strict=True)):
        if params.temperature == 0:
            assert token == int(logits[row].argmax())
        else:
            assert_drawn_right(logits[row], params, 10 + row, 3, token)


def test_thousands_of_draws_equal_the_cpu_sampler_and_the_float64_reference() -> None:
    rows = [settings(**FILTERS[1 + i % (len(FILTERS) - 1)]) for i in range(2000)]
    logits = torch.randn(len(rows), 60) * (1 + torch.arange(2000)[:, None] % 4)
    ours = sampled("reference", logits, 60, Staged(60, rows))[0]
    truth = sampled("reference", logits.double(), 60, Staged(60, rows))[0]
    cpu = Sampler(60).sample(logits, [SampleRow(f"r{i}", p, i, 0, [], 0) for i, p in enumerate(rows)])
    theirs = list(cpu.tokens.values())
    for row in range(2000):
        assert_drawn_right(logits[row], rows[row], row, 0, ours[row])
    # two tokens arrive within 2**-16 of each other once in 60 000 draws
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1
    assert sum(a != b for a, b in zip(ours, truth, strict=True)) <= 1


def test_frequencies_follow_the_distribution() -> None:
    for params, shares in (
        (settings(), EIGHTHS.tolist()),
        (settings(top_k=2), [0, 2 / 3, 0, 1 / 3, 0]),
        (settings(top_p=0.8), [1 / 7, 4 / 7, 0, 2 / 7, 0]),
    ):
        logits = EIGHTHS.log().expand(4000, 5)
        counts = Counter(sampled("reference", logits, 5, Staged(5, [params] * 4000))[0])
        for token, share in enumerate(shares):
            assert abs(counts[token] - 4000 * share) <= 4 * (4000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("route", ROUTES)
def test_a_row_draws_the_same_alone_in_a_batch_and_under_any_grid(route: str) -> None:
    rows = [settings(**FILTERS[at]) for at in (4, 6, 8)]
    logits = torch.randn(3, 120)
    together = sampled(route, logits, 120, Staged(120, rows, seed=5))[0]
    grids = [CANDIDATES[3] if route == CUDA else TINY_BINS]
    for config in grids:
        for at in range(3):
            alone = Staged(120, [rows[at]], seed=5 + at)
            assert sampled(route, logits[at : at + 1], 120, alone, config)[0] == [together[at]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("in_the_row", [False, True])
def test_of_equal_logits_the_lower_ids_survive_top_k_and_top_p(route: str, in_the_row: bool) -> None:
    config = TINY_BINS if in_the_row and route == INTERPRETER else None
    logits = torch.zeros(4, 100)
    logits[:, :3] = -5.0
    for seed in (0, 9):
        rows = [
            settings(top_k=2),
            settings(top_p=0.05),
            settings(top_k=3, top_p=0.5),
            settings(temperature=0),
        ]
        tokens = sampled(route, logits, 100, Staged(100, rows, seed=seed), config)[0]
        for token, kept in zip(tokens, ([3, 4], [3, 4, 5, 6, 7], [3, 4], [3]), strict=True):
            assert token in kept


@pytest.mark.parametrize("route", ROUTES)
def test_a_min_p_of_one_leaves_the_best_and_its_equals(route: str) -> None:
    logits = torch.randn(12, 100)
    logits[:, [7, 70]] = 9.0
    tokens = sampled(route, logits, 100, Staged(100, [settings(min_p=1.0)] * 12))[0]
    assert set(tokens) == {7, 70}


@pytest.mark.parametrize("route", ROUTES[1:2])
@pytest.mark.parametrize(
    ("bits", "worse", "top_k", "chunk"),
    [
        (6543216, [], 0, 16),  # tokens 8 and 17, of two splits
        (6543216, [], 31, 16),  # the same, in the tokens that are searched
        (13163630, [], 31, 2),  # 19 and 21, one behind the other in a place of the search
        (9627204, range(16), 31, 16),  # 0, which is searched, and 29, which is kept anyway
        (1625052, range(16, 32), 31, 16),  # the other way round, 8 and 30
    ],
)
def test_of_tokens_that_arrive_together_the_lower_id_is_drawn(
    route: str, bits: int, worse: Sequence[int], top_k: int, chunk: int
) -> None:
    """Numbers found by trying 17 million: the float32 leads of two tokens are equal, by numpy's log2."""
    logits = torch.zeros(1, 32)
    logits[0, list(worse)] = -0.5
    staged = Staged(32, [settings(top_k=top_k)])
    row_fields(staged.rows.numpy())["random_bits"][0] = bits
    leads = leads_of(-logits[0], bits, scale_of(1.0), "cpu")
    config = Config(chunk=chunk, num_warps=1, edges=4, few=4, most=64)
    assert sampled(route, logits, 32, staged, config)[0] == [int(leads.argmax())]


@pytest.mark.parametrize("route", ROUTES)
def test_bad_rows_say_why_and_leave_the_others_alone(route: str) -> None:
    random, greedy = settings(), settings(temperature=0)
    forbidden = settings(logit_bias=dict.fromkeys(range(8), -100.0))
    rows = [random, greedy, None, random, greedy, forbidden, random]
    logits = torch.zeros(7, 12)
    logits[:, 8:] = 50.0  # padding
    logits[:, 2] = 40.0
    logits[0, 5] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = torch.nan  # a row that samples nothing
    logits[3, :8] = -torch.inf
    staged = Staged(8, rows, device="cuda" if route == CUDA else "cpu")
    tokens, status, last = sampled(route, logits, 8, staged)
    assert status == [BAD_LOGITS, BAD_LOGITS, OK, BAD_LOGITS, OK, NONE_ALLOWED, OK]
    assert tokens == [0, 0, 0, 0, 2, 0, 2]
    assert last == [0, 0, 0, 2, 0, 2, -7]  # six slots are taken


@pytest.mark.parametrize("route", ROUTES)
def test_a_vocabulary_of_one_and_one_past_a_split_are_right(route: str) -> None:
    for vocab in (1, 65):
        rows = [settings(top_p=0.9), settings(temperature=0), settings()]
        logits = torch.full((3, vocab + 3), 9.0)
        logits[:, :vocab] = -1.0
        logits[:, vocab - 1] = 7.0
        assert sampled(route, logits, vocab, Staged(vocab, rows))[0] == [vocab - 1] * 3
    assert sampled(route, torch.empty(0, 5), 5, Staged(5, [])) == ([], [], [])


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 100.0])
def test_extreme_temperatures_neither_overflow_nor_draw_the_impossible(temperature: float) -> None:
    logits = torch.tensor([-1e30, 3e4, 2.9e4, -torch.inf]).expand(50, 4)
    tokens = sampled("reference", logits, 4, Staged(4, [settings(temperature=temperature)] * 50))[0]
    assert set(tokens) <= ({1} if temperature < 1 else {1, 2})


def test_fields_lie_where_the_kernels_read_them() -> None:
    words = torch.zeros(WORDS * 3, dtype=torch.int64).numpy()
    fields = row_fields(words)
    fields["counts"][1], fields["kind"][2], fields["presence"][0] = 5, 2, 0.5
    assert words[3 * 3 + 1] == 5
    narrow = words.view("int32")
    assert narrow[2 * 5 * 3 + 2] == 2
    assert words.view("float32")[2 * 5 * 3 + 7 * 3] == 0.5
    with pytest.raises(ValueError, match=r"int64 \[10\]; they must be int64 \[9 \* R\]"):
        row_fields(torch.zeros(10, dtype=torch.int64).numpy())
    assert [top_p_of(share) for share in (1.0, 0.5, 0.25, 1e-30)] == [0, -(2**63), 2**62, 1]
    assert limit_of(2.0, 1.0) == 0.0


def test_arguments_that_do_not_fit_are_refused_with_both_sides_named() -> None:
    staged = Staged(5, [settings()] * 2)
    with pytest.raises(ValueError, match=r"logits have shape \[2, 4\].*vocab_size, which is 5"):
        OP(torch.zeros(2, 4), staged.rows, 5, *staged.results)
    with pytest.raises(ValueError, match=r"rows is torch.int64 \[18\]; for 3 rows of logits .* \[27\]"):
        OP(torch.zeros(3, 5), staged.rows, 5, *staged.results)
    with pytest.raises(ValueError, match=r"status is torch.int64 \[2\]; .* torch.int32 \[2\]"):
        OP(torch.zeros(2, 5), staged.rows, 5, staged.last_tokens, staged.tokens, staged.tokens)


def test_opcheck() -> None:
    staged = Staged(5, [settings(), settings(temperature=0)])
    torch.library.opcheck(OP, (torch.randn(2, 8), staged.rows, 5, *staged.results))


@pytest.mark.gpu
def test_one_captured_graph_serves_greedy_and_random_rows_of_a_real_vocabulary() -> None:
    vocab, count = 128256, 20
    graph = torch.cuda.CUDAGraph()
    logits = torch.zeros(count, vocab, dtype=torch.bfloat16, device="cuda")
    held = Staged(vocab, [settings()] * count, device="cuda")
    OP(logits, held.rows, vocab, *held.results)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        OP(logits, held.rows, vocab, *held.results)
    for turn, spread in enumerate((4.0, 1.0, 0.0, 2.0)):
        rows = [settings(temperature=0) if turn == 3 else settings(**FILTERS[i % 10]) for i in range(count)]
        fresh = Staged(vocab, rows, seed=100 * turn)
        values = (torch.randn(count, vocab) * spread).bfloat16()
        logits.copy_(values)
        held.rows.copy_(fresh.rows)
        graph.replay()
        tokens = held.tokens.tolist()
        assert held.status.tolist() == [OK] * count
        assert held.last_tokens.tolist() == tokens == sampled(CUDA, values, vocab, fresh)[0]
        for row, (token, params) in enumerate(zip(tokens, rows, strict=True)):
            if params.temperature == 0:
                assert token == int(values[row].argmax())
            else:
                assert_drawn_right(values[row], params, 100 * turn + row, 0, token)
