"""What every fusion does by itself: tries spellings, keeps books and fuel, proves each kind of place once."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, fx

from ostinato.errors import CompileError
from ostinato.passes.base import Fuel
from ostinato.passes.fusion import FusionPass
from ostinato.passes.match import Match, Spelling, example
from tests.support.graphs import ops, trace

aten = torch.ops.aten


def scaled_exp(x: Tensor, scale: float) -> Tensor:
    return torch.exp(x * scale)


def exp_then_shift(x: Tensor, scale: float) -> Tensor:
    return torch.exp(x + scale)


def power(x: Tensor, scale: float) -> Tensor:
    return torch.exp2(x * (scale * 1.0)).pow(1.4426950408889634)


def wrong(x: Tensor, scale: float) -> Tensor:
    return torch.exp2(x * scale)


class FuseExp(FusionPass):
    name = "exp"
    numerics = "close"
    anchors = (aten.exp.default,)
    replacements = (power, power)

    def spellings(self, anchor: fx.Node) -> Iterable[Spelling] | str | None:
        examples = {"x": example(anchor), "scale": 0.37}
        if example(anchor).dtype == torch.float64:
            return "float64"
        if example(anchor).dim() == 1:
            return None
        return [
            Spelling(pattern, replacement, examples)
            for pattern, replacement in zip((exp_then_shift, scaled_exp), self.replacements, strict=True)
        ]

    def check(self, match: Match) -> str | None:
        return "scale is 5" if match.constants["scale"] == 5.0 else None


class FuseExpWrongly(FuseExp):
    replacements = (wrong, wrong)


def layers(*scales: float, width: int = 4):
    """exp(x * scale) for each of `scales`, one after the other."""

    def function(x: Tensor) -> Tensor:
        for scale in scales:
            x = torch.exp(x * scale)
        return x

    return trace(function, torch.randn(7, width))


def test_the_first_spelling_that_fits_is_taken_with_its_own_numbers():
    graph_module = layers(2.0, 0.5)
    report = FuseExp()(graph_module)
    assert (report.matched, report.refused) == (2, {})
    assert ops(graph_module) == {"mul": 2, "exp2": 2, "pow": 2}
    scales = [n.args[1] for n in graph_module.graph.nodes if n.target == aten.mul.Tensor]
    assert scales == [2.0, 0.5]
    x = torch.randn(3, 4)
    torch.testing.assert_close(graph_module(x)[0], torch.exp(torch.exp(x * 2.0) * 0.5))


def test_equal_places_are_proven_once_and_other_numbers_or_sizes_again():
    assert len(FuseExp()(layers(2.0, 2.0, 2.0)).proofs) == 1
    assert len(FuseExp()(layers(2.0, 0.5, 2.0)).proofs) == 2
    (proof,) = FuseExp()(layers(2.0, width=6)).proofs
    assert proof.ok
    assert proof.description == "float32: x [5, 6], scale=2"


def test_a_replacement_that_computes_something_else_is_a_compile_error_that_names_the_pass():
    with pytest.raises(CompileError, match=r"pass exp at node exp .*scale=2.*passes.off=exp"):
        FuseExpWrongly()(layers(2.0))
    assert FuseExpWrongly()(layers(2.0), proves=False).matched == 1


def test_fuel_ends_the_matches_and_leaves_the_rest_as_it_was():
    graph_module = layers(2.0, 0.5, 0.25)
    fuel = Fuel(2)
    assert FuseExp()(graph_module, fuel=fuel).matched == 2
    assert (ops(graph_module)["exp"], fuel.left) == (1, 0)
    before = graph_module.code
    assert FuseExp()(graph_module, fuel=fuel).matched == 0
    assert graph_module.code == before


@pytest.mark.parametrize(
    ("function", "x", "refused"),
    [
        (lambda x: torch.exp(x * 5.0), torch.randn(7, 4), {"scale is 5": 1}),
        (lambda x: torch.exp(x * 2.0) + torch.exp(x * 5.0), torch.randn(7, 4).double(), {"float64": 2}),
        (lambda x: torch.exp(x * 2.0), torch.randn(7), {}),
    ],
    ids=["by check", "by spellings", "no business"],
)
def test_a_refusal_is_counted_by_reason_and_leaves_the_graph(function, x, refused):
    graph_module = trace(function, x)
    before = graph_module.code
    report = FuseExp()(graph_module)
    assert (report.matched, report.refused) == (0, refused)
    assert graph_module.code == before


def test_a_near_miss_names_what_differs_from_the_spelling_that_came_closest():
    graph_module = trace(lambda x: torch.exp(x / 2.0), torch.randn(7, 4))
    report = FuseExp()(graph_module)
    assert report.matched == 0
    (reason,) = report.refused
    assert "div" in reason
