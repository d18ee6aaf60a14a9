"""Traced models that embed or score give transformers' numbers, and what cannot be carried is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.errors import ModelError
from ostinato.graph.build import build_model
from ostinato.graph.config import GraphConfig
from ostinato.graph.pool_hooks import PoolHooks
from ostinato.graph.source import load_config, open_source
from tests.support.pool_captured import Captured
from tests.support.tiny_encoders import VOCAB, hidden_states, make_encoder, pair_score

LENGTHS = (9, 1, 23)
CLOSE = 1e-5  # float32, numbers up to 4


def sequences() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def pooled(model: PreTrainedModel, ids: list[int], pooling: str) -> Tensor:
    states = hidden_states(model, ids)
    return states.mean(0) if pooling == "mean" else states[-1 if pooling == "last" else 0]


@pytest.mark.parametrize(
    ("family", "stated", "pooling", "windows", "window"),
    [
        ("roberta", "auto", "mean", {0}, 64),  # its positions begin at 2
        ("modernbert", "cls", "cls", {0, 6}, 66),  # tokens up to 5 away are seen
        ("gemma3_text", "auto", "mean", {0, 3}, 66),  # a decoder whose attention looks both ways
        ("mistral", "auto", "last", {5}, 66),
        ("mpnet", "auto", "mean", set(), 64),  # attention of its own code, which gets a mask
    ],
)
def test_vectors_are_those_of_each_sequence_alone(
    family: str, stated: Any, pooling: str, windows: set[int], window: int, tmp_path: Path
):
    model = make_encoder(family, tmp_path)
    captured = Captured(tmp_path, GraphConfig(pooling=stated))
    facts = captured.graph.facts
    assert (captured.pooling.pooling, facts.max_model_len, facts.kv_layers) == (pooling, window, ())
    assert {attention.window for attention in facts.attention} == windows
    assert captured.pooling.causal == (family == "mistral")
    found = captured.run(sequences(), [])
    truth = torch.stack([pooled(model, ids, pooling) for ids in sequences()])
    assert (found - truth).abs().max() < CLOSE


@pytest.mark.parametrize(
    ("family", "pooling", "config"),
    [
        ("xlm-roberta", "cls", {}),
        ("modernbert", "mean", {"sbert_ce_default_activation_function": "x.Identity"}),
        ("qwen3", "last", {}),
    ],
)
def test_scores_are_those_of_each_pair_alone(
    family: str, pooling: str, config: dict[str, Any], tmp_path: Path
):
    model = make_encoder(family, tmp_path, task="score", num_hidden_layers=1, **config)
    captured = Captured(tmp_path, GraphConfig())
    assert (captured.pooling.task, captured.pooling.pooling) == ("score", pooling)
    assert captured.pooling.sigmoid == (not config)
    captured.prove()
    types = [[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2) for ids in sequences()]
    found = captured.run(sequences(), types)[:, 0]
    pairs = zip(sequences(), types, strict=True)
    assert found.tolist() == pytest.approx([pair_score(model, *pair) for pair in pairs], abs=CLOSE)


@pytest.mark.parametrize(
    ("family", "task", "config"),
    [
        ("eurobert", "score", {"classifier_pooling": "late"}),  # its head reads every row
        ("convbert", "embed", {}),  # it mixes neighbours, of whatever sequence
    ],
)
def test_what_sees_other_sequences_or_rows_does_not_pass_the_proof(
    family: str, task: str, config: dict[str, Any], tmp_path: Path
):
    make_encoder(family, tmp_path, task=task, num_hidden_layers=1, **config)
    captured = Captured(tmp_path, GraphConfig())
    with pytest.raises(
        ModelError, match="alone than for it among others: layers that mix sequences, or a head"
    ):
        captured.prove()


@pytest.mark.parametrize(
    ("family", "task", "config", "said"),
    [
        ("deberta-v2", "embed", {}, "0 of its 2 layers use transformers' attention interface"),
        ("bert", "score", {"num_labels": 3}, "3 labels; a model that scores pairs has one"),
        ("bert", "score", {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "'torch.nn.Tanh'"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(
    family: str, task: Any, config: dict[str, Any], said: str, tmp_path: Path
):
    make_encoder(family, tmp_path, task=task, **config)
    with pytest.raises(ModelError, match=said):
        Captured(tmp_path, GraphConfig(task=task))


def test_a_task_needs_a_class_for_it(tmp_path: Path):
    make_encoder("bert", tmp_path)
    for task in ("score", "generate"):
        with pytest.raises(ModelError, match=rf"\['BertModel'\]: to {task}, a model needs a class"):
            build_model(load_config(open_source(tmp_path)), torch.float32, PoolHooks(), task=task)  # type: ignore[arg-type]
