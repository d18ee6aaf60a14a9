"""The mask that keeps the sequences of a step apart."""

import pytest
import torch

from ostinato.ops.sequence_mask import OP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_token_sees_those_of_its_sequence(dtype: torch.dtype, index: torch.dtype) -> None:
    found = OP(torch.arange(6), torch.tensor([0, 2, 3, 6], dtype=index), dtype)
    sequence = torch.tensor([0, 0, 1, 2, 2, 2])
    assert torch.equal(found == 0, sequence[:, None] == sequence[None, :])
    assert (found[0, 5].item(), found.dtype) == (torch.finfo(dtype).min, dtype)


def test_one_sequence_sees_itself_whole() -> None:
    assert not OP(torch.arange(4), torch.tensor([0, 4]), torch.float32).any()


def test_registered_as_torch_wants_it() -> None:
    args = torch.arange(5), torch.tensor([0, 2, 5]), torch.float32
    torch.library.opcheck(OP, args, test_utils=("test_schema", "test_faketensor"))


def test_what_does_not_fit_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"sequence_mask: .*token_ids"):
        OP(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 2]), torch.float32)
    with pytest.raises(ValueError, match=r"sequence_mask: .*query_start"):
        OP(torch.arange(4), torch.tensor([0.0, 4.0]), torch.float32)
