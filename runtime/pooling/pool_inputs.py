"""The tensors of a step of whole sequences. T tokens of all of them, B sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from ostinato.graph.facts import PoolingMode
from ostinato.ops.step_inputs import PoolInputs


def pool_inputs(
    sequences: Sequence[Sequence[int]],
    token_types: Sequence[Sequence[int]],
    pooling: PoolingMode,
) -> PoolInputs:
    """Token ids of each sequence, which has at least one, and their types (empty: all 0)."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    starts = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    tokens = int(starts[-1])
    types = np.zeros(tokens, np.int64)
    for start, given in zip(starts, token_types, strict=False):
        types[start : start + len(given)] = given
    return PoolInputs(
        token_ids=torch.from_numpy(np.fromiter(chain.from_iterable(sequences), np.int64, tokens)),
        positions=torch.from_numpy(np.arange(tokens) - np.repeat(starts[:-1].astype(np.int64), lengths)),
        token_types=torch.from_numpy(types),
        query_start=torch.from_numpy(starts),
        rows=torch.from_numpy((starts[1:] - 1 if pooling == "last" else starts[:-1]).astype(np.int64)),
    )


def moved(inputs: PoolInputs, device: torch.device) -> PoolInputs:
    """On the device, but for `query_start`: attention reads it on the host."""
    there = PoolInputs(*(tensor.to(device) for tensor in inputs))
    return there._replace(query_start=inputs.query_start)
