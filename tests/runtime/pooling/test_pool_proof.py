"""The proof of a model that embeds or scores: what it records, and what it refuses."""

from pathlib import Path

import pytest
import torch

from ostinato.errors import CompileError
from ostinato.graph.config import GraphConfig
from ostinato.runtime.pooling.pool_proof import LENGTHS
from tests.support.pool_captured import Captured
from tests.support.tiny_encoders import make_encoder


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("encoder")
    make_encoder("roberta", folder)
    return Captured(folder, GraphConfig(pooling="mean"))


def test_the_unfused_program_is_as_good_as_the_graph(embeds: Captured):
    proof = embeds.prove()
    assert proof.tokens == sum(LENGTHS)
    assert 0 < proof.unfused_error == proof.max_error <= proof.budget < 1e-4
    assert (proof.typical, proof.kv_typical, proof.typical_budget) == (1.0, None, 4.0)


def test_one_wrong_number_is_refused(embeds: Captured):
    def spoil(results: torch.Tensor) -> torch.Tensor:
        results[2, 3] += 0.01
        return results

    with pytest.raises(CompileError, match=r"results differ from float64 by 0\.01 .*passes\.fuel"):
        embeds.prove(spoil)


def test_nan_is_refused(embeds: Captured):
    with pytest.raises(CompileError, match="results differ from float64 by inf"):
        embeds.prove(lambda results: results * float("nan"))


def test_scores_are_too_few_for_a_typical_error(tmp_path: Path):
    make_encoder("bert", tmp_path, task="score")
    proof = Captured(tmp_path, GraphConfig()).prove()
    assert proof.typical is None
    assert 0 < proof.max_error <= proof.budget
