"""GGUF files of tiny models, written as llama.cpp's converters write them. Needs the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from tests.support.tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID, PAD_ID, VOCAB, tiny_model, tiny_tokenizer

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
# Changes of the tiny configs to what a GGUF file can express, so that the round trip is exact.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64},  # a whole number of quantization blocks
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}


def gguf_model(family: str, **changes: Any) -> PreTrainedModel:
    """The transformers model that `write_gguf` writes."""
    return tiny_model(family, **{**CHANGES.get(family, {}), **changes})


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    model: PreTrainedModel | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a tiny model, its matrices in number format `kind`.

    `metadata` and `tensors` are added; a value of None removes a key.
    """
    model = model or gguf_model(family)
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    content = {**_metadata(model.config, architecture), **_tokenizer(), **(metadata or {})}
    for key, value in content.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), 8
    )
    for name, values in _llama_cpp_tensors(model, family).items():
        stem, _, leaf = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{leaf}"
        if values.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    """Keys of the architecture, under llama.cpp's names."""
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    stated = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("full_attention", rope).get("rope_theta")),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    if rope.get("full_attention", rope)["rope_type"] == "linear":
        stated |= {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": float(rope["full_attention"]["factor"]),
        }
    return {f"{architecture}.{key}": value for key, value in stated.items()}


def _tokenizer() -> dict[str, Any]:
    parsed = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokens = [f"[unused{index}]" for index in range(VOCAB)]
    for token, index in parsed["model"]["vocab"].items():
        tokens[index] = token
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index < 4 else 1 for index in range(VOCAB)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in parsed["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.padding_token_id": PAD_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _llama_cpp_tensors(model: PreTrainedModel, family: str) -> dict[str, np.ndarray]:
    """Tensors as llama.cpp stores them: q, k of llama interleaved, Gemma's norms plus one, gate, up apart."""
    config, made = model.config, {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("experts.gate_up_proj"):
            for half, stem in zip(np.split(values, 2, axis=1), ("gate", "up"), strict=True):
                made[name.replace("gate_up_proj", f"{stem}_proj.weight")] = np.ascontiguousarray(half)
        elif name.endswith("experts.down_proj"):
            made[f"{name}.weight"] = values
        else:
            made[name] = np.ascontiguousarray(values)
    return made
