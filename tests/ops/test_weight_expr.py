"""Weight expressions: every form gives the tensor it names; nothing else is understood."""

import pytest
import torch

from ostinato.ops.weight_expr import (
    cast,
    concat,
    evaluate,
    load,
    reshape,
    slice_,
    sources,
    stack,
    transpose,
)

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0, 12.0).view(2, 3)}


@pytest.mark.parametrize(
    ("expr", "want"),
    [
        (load("a"), [[0.0, 1, 2], [3, 4, 5]]),
        (concat([load("a"), load("b")]), [[0.0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        (concat([load("a"), load("b")], dim=1), [[0.0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]),
        (stack([load("b"), load("a")]), [[[6.0, 7, 8], [9, 10, 11]], [[0, 1, 2], [3, 4, 5]]]),
        (slice_(load("a"), 1, 1, 3), [[1.0, 2], [4, 5]]),
        (transpose(load("a"), 0, 1), [[0.0, 3], [1, 4], [2, 5]]),
        (reshape(slice_(load("b"), 0, 1, 2), [3, 1]), [[9.0], [10], [11]]),
    ],
)
def test_each_form_gives_its_tensor(expr, want):
    assert evaluate(expr, TENSORS.__getitem__).tolist() == want


def test_a_cast_rounds_to_its_type():
    made = evaluate(cast(load("x"), torch.bfloat16), lambda name: torch.tensor([1.0039]))
    assert made.dtype == torch.bfloat16
    assert made.item() == 1.0


def test_sources_are_the_names_in_order_with_repeats():
    expr = concat([transpose(load("b"), 0, 1), stack([load("a"), load("b")])])
    assert list(sources(expr)) == ["b", "a", "b"]


@pytest.mark.parametrize("expr", [["exec", "a"], ["load", 3], ["slice", 0, 1, ["load", "a"]], []])
def test_an_unknown_form_is_refused(expr):
    with pytest.raises(ValueError, match="unknown form"):
        evaluate(expr, TENSORS.__getitem__)
