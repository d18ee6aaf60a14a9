"""Tiny random Hugging Face model folders, one per family: config, weights, tokenizer.

Every number that could hide a mistake is odd on purpose: norm weights are not ones, biases are not zeros,
windows are shorter than a test prompt, head sizes differ from hidden / heads where the family allows it,
softcaps and multipliers are switched on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 320
PAD, BOS, EOS, IM_START = "<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>"
PAD_ID, BOS_ID, EOS_ID, IM_START_ID = 0, 1, 2, 3

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _ROPE, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "qwen2": {"rope_parameters": _ROPE, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": _ROPE, "head_dim": 32, "tie_word_embeddings": False},
    "mistral": {"rope_parameters": _ROPE, "head_dim": 16, "sliding_window": 9, "tie_word_embeddings": False},
    "gemma2": {
        "rope_parameters": _ROPE,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "tie_word_embeddings": True,
    },
    "phi3": {"rope_parameters": _ROPE, "original_max_position_embeddings": 512, "tie_word_embeddings": False},
    "olmo2": {"rope_parameters": _ROPE, "tie_word_embeddings": False},
    "granite": {
        "rope_parameters": _ROPE,
        "embedding_multiplier": 1.7,
        "logits_scaling": 1.3,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 0, 1],
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
    "glm4": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "starcoder2": {
        "rope_parameters": _ROPE,
        "sliding_window": 9,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
        "use_qkv_bias": True,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "rope_parameters": _ROPE,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "rope_parameters": _ROPE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}
FAMILIES = tuple(_FAMILIES)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Config of a tiny model of `family`; `changes` replace single fields."""
    return AutoConfig.for_model(family, **{**_BASE, **_FAMILIES[family], **changes})


def randomize(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Fill every parameter with seeded random values, the same on every run and in any dtype of the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _sorted_parameters(model):
        fresh = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            fresh *= 0.2
        elif parameter.dim() == 1:  # norm weights; Gemma's are offsets from one
            fresh = fresh * 0.2 + (0.0 if "gemma" in model.config.model_type else 1.0)
        elif "embed" in name:
            fresh *= 0.15  # small: attention must outweigh the token itself, also through a tied head
        else:
            fresh *= 1.2 / math.sqrt(parameter.shape[-1])
        with torch.no_grad():
            parameter.copy_(fresh)


def _sorted_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from sorted(model.named_parameters())


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The transformers model itself, in memory, in evaluation mode."""
    config = tiny_config(family, **changes)
    # eager: the one attention and experts code that knows softcaps and float32 in every transformers
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    randomize(model, seed=seed)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so any text (emoji too) round-trips; ids stay below VOCAB."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = [
        "the quick brown fox jumps over the lazy dog",
        "hello there, hello world",
        "one two three four five",
    ] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10,
        special_tokens=[PAD, BOS, EOS, IM_START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(
    family: str,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Write a tiny model folder of `family` to `path` and return it; `changes` replace config fields."""
    tiny_model(family, dtype=dtype, seed=seed, **changes).save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer().save_pretrained(path)
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Rewrite single keys of a JSON file; a value of None removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
