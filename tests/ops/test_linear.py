from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.linear import MAX_ROWS
from tests.support.budget import assert_within_budget

TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def linear(native_ops: Mapping[str, Callable[..., Any]]) -> Callable[..., Tensor]:
    return native_ops["aten::linear"]


def case(
    rows: int, num_out: int, num_in: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = [(rows, num_in), (num_out, num_in), (num_out,)]
    x, weight, bias = (torch.randn(size, generator=draw).to(dtype) for size in sizes)
    return x, weight, bias


# 4, 8, 16, 24 and 32 rows are where the kernel changes its method; 13 and 25 outputs leave a part of a tile.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (13, 33), (25, 64), (100, 577), (9, 1536)])
def test_every_method_and_rest_is_within_the_budget(linear, rows, num_out, num_in, dtype):
    x, weight, bias = case(rows, num_out, num_in, dtype)
    for given in (None, bias):
        truth = F.linear(x.double(), weight.double(), None if given is None else given.double())
        assert_within_budget(linear(x, weight, given), truth, F.linear(x, weight, given))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_matrix_of_many_tasks_is_right_on_several_threads(linear, dtype):
    x, weight, _ = case(3, 2049, 576, dtype)
    truth = F.linear(x.double(), weight.double())
    assert_within_budget(linear(x, weight), truth, F.linear(x, weight))


@pytest.mark.parametrize("dtype", TYPES)
def test_more_rows_than_the_native_limit_go_to_torch(linear, dtype):
    x, weight, bias = case(MAX_ROWS[dtype] + 1, 8, 40, dtype)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_leading_sizes_are_kept(linear):
    x, weight, _ = case(6, 5, 32, torch.float32)
    out = linear(x.view(1, 2, 3, 32), weight)
    assert out.shape == (1, 2, 3, 5)
    torch.testing.assert_close(out.view(6, 5), linear(x, weight), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 32), (1, 0, 32)])
def test_no_rows_give_no_rows(linear, shape):
    assert linear(torch.empty(shape), torch.randn(5, 32)).shape == (*shape[:-1], 5)


def test_no_inputs_give_the_bias(linear):
    bias = torch.randn(5)
    assert torch.equal(linear(torch.empty(2, 0), torch.empty(5, 0), bias), bias.expand(2, 5))


def test_strided_inputs_are_right(linear):
    x, weight, bias = case(4, 10, 64, torch.float32)
    for some_x, some_weight in ((x[:, ::2], weight[:, :32].contiguous()), (x[:, :32], weight[:, :32])):
        torch.testing.assert_close(linear(some_x, some_weight, bias), F.linear(some_x, some_weight, bias))


def test_float16_is_left_to_torch(linear):
    x, weight, bias = case(2, 10, 64, torch.float16)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(4, 8), None),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(4, dtype=torch.bfloat16)),
        (torch.ones(2, 7), torch.ones(4, 8), None),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(5)),
    ],
    ids=["type of x", "type of bias", "width of x", "size of bias"],
)
def test_a_mismatch_is_an_error_and_no_crash(linear, x, weight, bias):
    with pytest.raises(RuntimeError):
        linear(x, weight, bias)


def test_infinity_and_nan_reach_only_their_own_outputs(linear):
    x, weight, _ = case(2, 9, 48, torch.float32)
    x[0, 3] = float("nan")
    weight[4, 5] = float("inf")
    out = linear(x, weight)
    assert out[0].isnan().all()
    assert out[1, 4].isinf()
    assert out[1].isfinite().sum() == 8
