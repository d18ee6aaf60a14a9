"""Graphs for pass tests: small functions traced as models are; tiny models run before and after a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from transformers import PreTrainedModel

from ostinato.graph.capture import CapturedGraph
from ostinato.ops.weight_expr import evaluate
from ostinato.passes.base import Fuel, Pass
from ostinato.passes.proof import in_float64
from ostinato.passes.remove_noops import RemoveNoops
from tests.support.budget import assert_within_budget
from tests.support.captured import Sequences, kv_planes, weight_values


def assert_fuses(
    rewrite: Pass,
    function: Callable[..., Any],
    make: Callable[[int], Sequence[Tensor]],
    want_ops: dict[str, int] | None,
    *,
    matches: int = 1,
    tokens_dim: dict[int, int] | None = None,
) -> fx.GraphModule:
    """The whole contract of a fusion.

    It matches, only `want_ops` are left (None: the caller looks), a second run and a run without fuel change
    nothing, and the new graph gives the function's results (and what it wrote into its arguments) for any
    number of tokens. `make(tokens)` gives fresh arguments. Returns the new graph.
    """
    graph_module = trace(function, *make(7), tokens_dim=tokens_dim)
    before, unfused = graph_module.code, _copy(graph_module)
    assert rewrite(graph_module, fuel=Fuel(0)).matched == 0
    assert graph_module.code == before
    report = rewrite(graph_module)
    assert (report.matched, report.refused) == (matches, {}), report
    assert want_ops in (None, ops(graph_module)), ops(graph_module)
    assert report.proofs
    after = graph_module.code
    assert rewrite(graph_module).matched == 0
    assert graph_module.code == after
    for node in graph_module.graph.nodes:
        assert node.op == "output" or "val" in node.meta
    for tokens in (7, 1, 12):
        arguments = list(make(tokens))
        ours, plain = _results(graph_module, arguments), _results(unfused, arguments)
        truth = _results(in_float64(unfused), [_double(t) for t in arguments])
        for got, want, true in zip(ours, plain, truth, strict=True):
            if want.is_floating_point():
                assert_within_budget(got, true, want)
            else:
                assert torch.equal(got, want)
    return graph_module


def assert_refuses(
    rewrite: Pass,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    refused: dict[str, int],
    **options: Any,
) -> None:
    """Nothing matches, the reasons are those given, and the graph stays as it was."""
    graph_module = trace(function, *tensors, **options)
    before = graph_module.code
    report = rewrite(graph_module)
    assert (report.matched, report.refused) == (0, refused), report
    assert graph_module.code == before


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy to run; it shares the nodes' values."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


def _results(function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        returned = function(*copies)
    return [*returned, *copies]


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def trace(
    function: Callable[..., Any],
    *tensors: Tensor,
    tokens_dim: dict[int, int] | None = None,
    clean: bool = True,
) -> fx.GraphModule:
    """Trace `function` of `tensors`; argument i has its symbolic token count in dimension `tokens_dim[i]`.

    Without `tokens_dim`, dimension 0 of the first argument is symbolic. `clean` runs the clean-up that comes
    first in the pipeline.
    """
    dims = {0: 0} if tokens_dim is None else tokens_dim
    tokens = Dim("T", min=1, max=8192)
    shapes = tuple({dims[i]: tokens} if i in dims else None for i in range(len(tensors)))
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        exported = torch.export.export(_Function(function), tensors, strict=False, dynamic_shapes=(shapes,))
    graph_module = exported.graph_module
    if clean:
        RemoveNoops()(graph_module)
    return graph_module


def ops(graph_module: fx.GraphModule) -> Counter[str]:
    """Short operator name -> number of calls."""
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target).split(".")[1] if "." in str(node.target) else "getitem" for node in calls)


def name_weights(graph_module: fx.GraphModule, *places: int) -> None:
    """Make the placeholders at `places` weights that can be merged."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for place in places:
        placeholders[place].meta["weight"] = ["load", placeholders[place].name]


def run_step(
    graph_module: fx.GraphModule,
    model: PreTrainedModel,
    captured: CapturedGraph,
    lengths: list[int],
    *,
    in_double: bool = False,
) -> list[Tensor]:
    """Logits of every row and the KV planes after one step of new sequences of `lengths` tokens.

    `in_double` runs the same graph in float64, whatever the types of its casts.
    """
    values = weight_values(model, captured)
    seed = torch.Generator().manual_seed(3)
    sequences = Sequences([torch.randint(4, 300, (n,), generator=seed).tolist() for n in lengths])
    step = sequences.step(dict(enumerate(lengths)))
    planes = [torch.zeros_like(p) for p in kv_planes(captured, sequences.num_blocks, model.dtype)]
    weights = [
        evaluate(node.meta["weight"], values.__getitem__)
        for node in graph_module.graph.nodes
        if node.op == "placeholder" and node.meta["role"] == "weight"
    ]
    if in_double:
        weights, planes = [_double(w) for w in weights], [_double(p) for p in planes]
    with torch.no_grad():
        run = in_float64(graph_module) if in_double else graph_module
        (logits,) = run(*weights, *step, *planes)
    return [logits, *planes]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
