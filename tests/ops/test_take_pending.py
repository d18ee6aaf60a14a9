import pytest
import torch

from ostinato.ops import take_pending
from ostinato.ops.take_pending import BLOCK, OP
from tests.support.op_routes import ROUTES, run


@pytest.mark.parametrize("route", ROUTES)
def test_pending_tokens_come_from_their_slots_and_others_stay(route: str) -> None:
    ids, newest = torch.tensor([5, -1, 0, -4, -3, 70000]), torch.tensor([100, 101, 102, 1 << 40])
    run(route, take_pending, ids, newest)
    assert ids.tolist() == [5, 100, 0, 1 << 40, 102, 70000]


@pytest.mark.parametrize("route", ROUTES)
def test_any_number_of_tokens(route: str) -> None:
    newest = torch.arange(1000, 1300)
    for count in (0, 1, BLOCK - 1, BLOCK + 1):
        ids = -1 - torch.arange(count) % 300
        run(route, take_pending, ids, newest)
        assert ids.tolist() == [1000 + at % 300 for at in range(count)]


def test_wrong_types_and_strides_are_refused_by_name() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"token_ids is torch.int32; allowed are int64"):
        OP(ids.int(), ids)
    with pytest.raises(ValueError, match=r"last_tokens has stride 2; it must be contiguous"):
        OP(ids, ids[::2])


def test_opcheck() -> None:
    torch.library.opcheck(OP, (torch.tensor([1, -2]), torch.tensor([7, 8])))
