"""Mean of the rows of each sequence of a step: mean pooling.

Shapes: T rows of all sequences one after another, D width, S sequences.  x [T, D] -> [S, D]; query_start
[S + 1], int32 or int64: rows query_start[s] .. query_start[s + 1] are sequence s, which has at least one, and
the last entry is T.  query_start may be in host memory while x is on a GPU.
Types: fp16, bf16, fp32, fp64.  The result is float32 (float64 for float64), summed in that type.
"""

import torch
from torch import Tensor

from ostinato.ops.check import FLOATS, INTEGERS, check_shapes, check_types


def mean_rows_reference(x_TD: Tensor, query_start: Tensor) -> Tensor:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    lengths = query_start.diff().to(x_TD.device)
    sequence_T = torch.repeat_interleave(lengths, output_size=x_TD.shape[0])
    sums = x_TD.new_zeros((lengths.shape[0], x_TD.shape[1]), dtype=wide)
    return sums.index_add_(0, sequence_T, x_TD.to(wide)) / lengths[:, None]


def _launch(x_TD: Tensor, query_start: Tensor) -> Tensor:
    """The reference, on any device."""
    _check(x_TD, query_start)
    return mean_rows_reference(x_TD, query_start)


def _check(x_TD: Tensor, query_start: Tensor) -> None:
    check_shapes("mean_rows", x=(x_TD, "T D"), query_start=(query_start, "S+1"))
    check_types("mean_rows", FLOATS, x=x_TD)
    check_types("mean_rows", INTEGERS, query_start=query_start)


torch.library.define("ostinato::mean_rows", "(Tensor x, Tensor query_start) -> Tensor")
torch.library.impl("ostinato::mean_rows", "CUDA", _launch)
torch.library.impl("ostinato::mean_rows", "CPU", _launch)


@torch.library.register_fake("ostinato::mean_rows")
def _fake(x_TD: Tensor, query_start: Tensor) -> Tensor:
    _check(x_TD, query_start)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return x_TD.new_empty((query_start.shape[0] - 1, x_TD.shape[1]), dtype=wide)


OP = torch.ops.ostinato.mean_rows.default
