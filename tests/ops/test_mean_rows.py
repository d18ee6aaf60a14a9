"""The mean of the rows of each sequence."""

import pytest
import torch

from ostinato.ops.mean_rows import OP, mean_rows_reference

STARTS = torch.tensor([0, 5, 6, 29])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_summed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(29, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = OP(x, STARTS)
    truth = torch.stack([x[a:b].double().mean(0) for a, b in ((0, 5), (5, 6), (6, 29))])
    assert found.dtype == torch.float32
    assert (found - truth).abs().max() < 1e-6
    torch.testing.assert_close(mean_rows_reference(x.double(), STARTS), truth)


def test_a_sequence_does_not_see_the_values_of_another() -> None:
    x = torch.ones(29, 3)
    x[5] = float("nan")
    assert OP(x, STARTS).isnan().any(1).tolist() == [False, True, False]
    assert torch.equal(
        OP(torch.full((4, 2), 3.0), torch.tensor([0, 4], dtype=torch.int32)), torch.full((1, 2), 3.0)
    )


def test_registered_as_torch_wants_it() -> None:
    torch.library.opcheck(OP, (torch.randn(29, 4), STARTS), test_utils=("test_schema", "test_faketensor"))


def test_what_does_not_fit_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"mean_rows: .*x"):
        OP(torch.randn(29), STARTS)
    with pytest.raises(ValueError, match=r"mean_rows: .*query_start"):
        OP(torch.randn(29, 4), STARTS.float())
