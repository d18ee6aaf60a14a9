"""Tiny random models that embed or score, as Hugging Face folders, and what transformers says of inputs.

As in tiny_models.py numbers that could hide a mistake are odd on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from tests.support.tiny_models import randomize

VOCAB = 200
_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "type_vocab_size": 2,
}
_DECODER = {
    **_ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "modernbert": {
        **_ENCODER, "local_attention": 10, "global_attn_every_n_layers": 2, "cls_token_id": 2,
        "sep_token_id": 3, "classifier_pooling": "mean",
    },
    "eurobert": {**_ENCODER, "num_key_value_heads": 2},
    "mpnet": {key: value for key, value in _ENCODER.items() if key != "type_vocab_size"},
    "deberta-v2": _ENCODER,
    "convbert": _ENCODER,
    "qwen3": _DECODER,
    "mistral": {**_DECODER, "sliding_window": 5},
    "gemma3_text": {
        **_DECODER, "sliding_window": 5, "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"), _DECODER["rope_parameters"]
        ),
    },
}  # fmt: skip


def make_encoder(family: str, folder: Path, *, task: str = "embed", **config: Any) -> PreTrainedModel:
    """Write a folder with random weights and a tokenizer of words; return the model."""
    extra = {"num_labels": 1} if task == "score" else {}
    made = AutoConfig.for_model(family, **{**_FAMILIES[family], **extra, **config})
    torch.manual_seed(5)
    auto = AutoModel if task == "embed" else AutoModelForSequenceClassification
    model: PreTrainedModel = auto.from_config(made).eval()
    randomize(model)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return model


def tokenizer() -> Tokenizer:
    """Words w4 to w199; [CLS] and [SEP] around a text and between two."""
    words = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{i}": i for i in range(4, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def words(*numbers: int) -> str:
    """A text of these tokens."""
    return " ".join(f"w{number}" for number in numbers)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """[T, D] of one input alone, by transformers."""
    states: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


@torch.no_grad()
def pair_score(model: PreTrainedModel, ids: Sequence[int], types: Sequence[int]) -> float:
    """The logit of one pair alone, by transformers."""
    takes_types = model.config.model_type in ("bert", "xlm-roberta")
    more = {"token_type_ids": torch.tensor([types])} if takes_types else {}
    return float(model(input_ids=torch.tensor([ids]), **more).logits[0, 0])
