"""Scores of tokens: equal to the CPU's records, on every route."""

import pytest
import torch
from torch import Tensor

from ostinato.ops import token_scores
from ostinato.ops.token_scores import OP, token_scores_reference
from ostinato.runtime.sampling.logprobs import token_logprobs
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, ROUTES, run, sized


def asked(*questions: tuple[int, int, int]) -> Tensor:
    return torch.tensor(questions).T.contiguous()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_are_those_of_the_cpu_records(route: str, dtype: torch.dtype) -> None:
    vocab = sized(route, 4100, 128256)  # two splits and more
    logits = (torch.randn(3, vocab + 8) * 3).to(dtype)
    sampled = torch.tensor([7, 8, 4099])
    questions = [(2, -1, 5), (0, 3, 20), (2, 11, 0)]
    answer = run(route, token_scores, logits, sampled, asked(*questions), vocab, 20)
    truth = token_scores_reference(logits.double(), sampled, asked(*questions), vocab, 20)
    for row, (place, token, num_top) in enumerate(questions):
        token = 4099 if token < 0 else token
        (record,) = token_logprobs(logits[place : place + 1, :vocab], [token], [num_top])
        ids, values = answer[row, 2 : 2 + num_top], answer[row, 22 : 22 + num_top].view(torch.float32)
        assert answer[row, 0] == record.rank
        assert ids.tolist() == [id for id, _ in record.top]
        plain = torch.tensor([record.logprob, *(value for _, value in record.top)])
        ours = torch.cat([answer[row, 1:2].view(torch.float32), values])
        exact = logits[place, :vocab].double().log_softmax(0)[[token, *ids.tolist()]]
        assert_within_budget(ours, exact, plain)
        assert truth[row, 0] == record.rank


@pytest.mark.parametrize("route", ROUTES)
def test_equal_logits_come_by_id_and_impossible_ones_last(route: str) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -0.0, 1.0, -torch.inf, 9.0]])
    answer = run(route, token_scores, logits, torch.tensor([3]), asked((0, -1, 6)), 6, 6)
    assert answer[0, 2:8].tolist() == [2, 4, 0, 3, 1, 5]
    assert answer[0, 0] == 3
    assert answer[0, 8:].view(torch.float32)[4:].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("route", ROUTES)
def test_rows_without_a_distribution_have_rank_zero(route: str) -> None:
    logits = torch.zeros(4, 5)
    logits[0, 1], logits[1, 1], logits[2] = torch.nan, torch.inf, -torch.inf
    questions = asked(*((row, 0, 2) for row in range(4)))
    answer = run(route, token_scores, logits, torch.zeros(4).long(), questions, 5, 2)
    assert answer[:, 0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("route", ROUTES)
def test_more_alternatives_than_the_kernel_keeps_are_sorted(route: str) -> None:
    logits = torch.randn(1, 50)
    answer = run(route, token_scores, logits, torch.tensor([0]), asked((0, 4, 50)), 50, 50)
    assert answer[0, 2:52].tolist() == logits[0].sort(descending=True).indices.tolist()


def test_arguments_that_do_not_fit_are_refused_with_both_sides_named() -> None:
    logits, sampled = torch.zeros(2, 5), torch.zeros(2).long()
    with pytest.raises(ValueError, match="most=6; allowed are 0 to the vocabulary's 5 tokens"):
        OP(logits, sampled, asked((0, 0, 0)), 5, 6)
    with pytest.raises(ValueError, match=r"sampled is torch.int64 \[3\]; .* int64 \[2\]"):
        OP(logits, torch.zeros(3).long(), asked((0, 0, 0)), 5, 1)
    with pytest.raises(ValueError, match=r"asked is torch.int64 \[2, 1\]; .* \[3, n\]"):
        OP(logits, sampled, torch.zeros(2, 1).long(), 5, 1)
    assert OP(logits, sampled, torch.zeros(3, 0).long(), 5, 1).shape == (0, 4)


def test_opcheck() -> None:
    torch.library.opcheck(OP, (torch.randn(2, 8), torch.tensor([1, 2]), asked((0, 1, 2), (1, -1, 0)), 7, 2))
