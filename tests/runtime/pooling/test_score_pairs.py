"""Which texts are compared with which, and what vectors of length 1 say of them."""

import pytest

from ostinato.runtime.pooling.score_pairs import cosines, pairs_of


def test_one_is_compared_with_each_and_several_one_by_one() -> None:
    assert pairs_of(["a"], ["x", "y"]) == [("a", "x"), ("a", "y")]
    assert pairs_of(["a", "b"], ["x", "y"]) == [("a", "x"), ("b", "y")]
    assert cosines([[1.0, 0.0]], [[0.6, 0.8], [0.0, 1.0]]) == pytest.approx([0.6, 0.0])
    assert cosines([[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.8], [0.6, 0.8]]) == pytest.approx([0.6, 0.8])


def test_rounding_makes_no_cosine_of_more_than_one() -> None:
    longer = [0.6000001, 0.8000001]  # of a length of 1 as float32 has it
    assert cosines([longer], [longer, [-value for value in longer]]) == [1.0, -1.0]
