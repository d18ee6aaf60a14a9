"""The numeric proof of a program that gives numbers for whole inputs, against the unfused graph in float64.

Sequences of different lengths run in one step. The rule is that of proof.py, for a whole network. In
float64 each sequence also runs alone, and must give the same: a model in which one sequence can see another
(a convolution over the step, an attention that went unseen) is refused, and a classifier whose head reads
more than one row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ostinato.errors import ModelError
from ostinato.graph.facts import PoolingFacts
from ostinato.runtime.artifact import Proof
from ostinato.runtime.pooling.pool_inputs import moved, pool_inputs
from ostinato.runtime.program import Bound
from ostinato.runtime.proof import (
    FACTOR,
    interpret,
    kept,
    refuse_errors,
    refuse_infinite,
    typical_budget,
    typical_ratio,
)

LENGTHS = (13, 1, 29, 5, 21, 8, 3)
MANY_VALUES = 32  # a vector of so many has a typical error, a score has not
ALONE = 1e-9  # of the largest number: float64 with sums in another order is off by 1e-15 a layer
CPU = torch.device("cpu")


def prove_pooling(
    graph_module: fx.GraphModule,
    weights: Callable[[fx.Node], Tensor],
    program: Bound,
    pooling: PoolingFacts,
    *,
    alone: fx.GraphModule | None,
    dtype: torch.dtype,
    vocab_size: int,
    longest: int,
    device: torch.device = CPU,
    seed: int = 0,
) -> Proof:
    """Raise CompileError over budget, ModelError for NaN or sequences that see each other; see `prove`.

    `alone`: see `CapturedGraph`.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = vocab_size // 4, -(-vocab_size * 3 // 4)  # padding tokens, which heads skip, are first or last
    sequences = [
        torch.randint(*ids, (min(length, longest),), generator=generator).tolist() for length in LENGTHS
    ]
    types = [[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2) for ids in sequences]
    if pooling.token_types < 2:
        types = [[0] * len(ids) for ids in sequences]
    inputs = moved(pool_inputs(sequences, types, pooling.pooling), device)
    if device != CPU:
        weights = kept(weights, device)
    truth = interpret(graph_module, weights, inputs, (), torch.float64).double().cpu()
    plain = interpret(graph_module, weights, inputs, (), None).double().cpu()
    ours = program(inputs, ()).double().cpu()
    refuse_infinite({"truth": (truth, ()), "plain": (plain, ())}, dtype)
    for row, (tokens, kinds) in enumerate(zip(sequences, types, strict=True)):
        one = moved(pool_inputs([tokens], [kinds], pooling.pooling), device)
        own = interpret(alone or graph_module, weights, one, (), torch.float64).double().cpu()
        if _apart(own[0], truth[row]) > ALONE * float(truth.abs().max()):
            raise ModelError(
                "transformers gives other numbers for an input alone than for it among others: layers that "
                "mix sequences, or a head that reads more than one row of each, cannot be carried"
            )
    error, unfused = float((ours - truth).abs().nan_to_num(nan=float("inf")).max()), _apart(plain, truth)
    eps = torch.finfo(dtype).eps
    budget = FACTOR * (unfused + eps * float(truth.abs().max()))
    proof = Proof(
        tokens=sum(map(len, sequences)),
        max_error=error,
        budget=budget,
        unfused_error=unfused,
        argmax_equal=bool(torch.equal(ours.argmax(-1), truth.argmax(-1))),
        kv_max_error=0.0,
        kv_budget=0.0,
        typical=typical_ratio(truth, plain, ours, eps) if truth.shape[-1] >= MANY_VALUES else None,
        kv_typical=None,
        typical_budget=typical_budget(dtype),
    )
    refuse_errors(proof, "results")
    return proof


def _apart(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())
