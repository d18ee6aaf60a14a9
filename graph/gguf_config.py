"""Metadata of a GGUF file -> the config.json that transformers would have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import ModelError
from ostinato.graph.gguf_file import GgufFile

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

# GGUF key (without the architecture) -> config field
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Read below by name, or without influence on the math.
_HANDLED = {
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "tensor_data_layout",
}
_LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFamily(NamedTuple):
    """How one GGUF architecture maps to transformers."""

    model_type: str
    model_class: str
    layer_names: Mapping[str, str]
    fields: Mapping[str, str] = {}  # beyond _FIELDS
    permuted: bool = False  # rows of q and k are interleaved
    norm_plus_one: bool = False


FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", _LLAMA, permuted=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", _LLAMA | _QK_NORM),
    "qwen3moe": GgufFamily(
        "qwen3_moe", "Qwen3MoeForCausalLM", _LLAMA | _QK_NORM | {"ffn_gate_inp": "mlp.gate"}, _EXPERTS
    ),
    "gemma2": GgufFamily("gemma2", "Gemma2ForCausalLM", _LLAMA | _GEMMA, _SOFTCAPS, norm_plus_one=True),
    "gemma3": GgufFamily(
        "gemma3_text", "Gemma3ForCausalLM", _LLAMA | _GEMMA | _QK_NORM, _SOFTCAPS, norm_plus_one=True
    ),
    "phi3": GgufFamily(
        "phi3", "Phi3ForCausalLM", _LLAMA | _PHI3, {"attention.sliding_window": "sliding_window"}
    ),
}


def hf_config(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """The config dict. Raises ModelError for a missing, contradictory or unknown key."""
    architecture = file.metadata["general.architecture"]
    stated = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    fields = {**_FIELDS, **family.fields}
    if unknown := [
        key for key, value in stated.items() if key not in fields and key not in _HANDLED and value
    ]:
        raise ModelError(
            f"{file.path}: metadata {architecture}.{unknown[0]}={stated[unknown[0]]!r:.60} is not known and "
            "may change the math; use the safetensors folder of the model"
        )
    stated.setdefault("attention.head_count_kv", stated.get("attention.head_count"))
    if missing := [key for key in _FIELDS if stated.get(key) is None]:
        raise ModelError(
            f"{file.path}: metadata {architecture}.{missing[0]} is missing; convert the model again"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(
            f"{file.path}: tensor token_embd.weight is missing; download or convert the file again"
        )
    config: dict[str, Any] = {fields[key]: value for key, value in stated.items() if key in fields}
    for field in ("num_key_value_heads", "intermediate_size", "num_attention_heads"):
        if isinstance(config[field], list):
            if len(set(config[field])) != 1:
                raise ModelError(
                    f"{file.path}: {field} differs by layer, which {family.model_class} cannot express"
                )
            config[field] = config[field][0]
    heads = config["num_attention_heads"]
    head_dim = stated.get("attention.key_length") or config["hidden_size"] // heads
    if stated.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{file.path}: attention.value_length differs from attention.key_length, not supported"
        )
    config |= {
        "model_type": family.model_type,
        "architectures": [family.model_class],
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope(file, stated, head_dim),
    }
    _family_facts(config, file)
    return config


def _rope(file: GgufFile, stated: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters; 10000 is the base that GGUF defines for files without one."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(stated.get("rope.freq_base", 10_000.0)),
    }
    kind = stated.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(stated["rope.scaling.factor"])}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = int(stated["rope.scaling.original_context_length"])
    elif kind != "none":
        raise ModelError(f"{file.path}: rope.scaling.type={kind!r}; readable: none, linear, yarn")
    rotated = stated.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if odd := [name for name in file.tensors if name.startswith("rope_factors_")]:
        raise ModelError(
            f"{file.path}: {odd[0]} (LongRoPE) is not supported; use the safetensors folder of the model"
        )
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3_rope(file, rope["rope_theta"], rotated)
    return rope


def _llama3_rope(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """llama.cpp stores Llama 3's frequency scaling as a table of divisors; find what makes it."""
    table = file.read("rope_freqs.weight")
    factor = float(table.max())
    expected = llama3_divisors(theta, rotated, factor)
    if table.shape != expected.shape or not torch.allclose(table, expected, rtol=1e-4):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is not Llama 3's frequency scaling; "
            "use the safetensors folder of the model"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_FACTORS}


def llama3_divisors(theta: float, rotated: int, factor: float) -> Tensor:
    """What Llama 3 divides each rotary frequency by: 1 for short waves, `factor` for long, a ramp between."""
    wave = 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    low, high = _LLAMA3_FACTORS["low_freq_factor"], _LLAMA3_FACTORS["high_freq_factor"]
    ramp = ((_LLAMA3_FACTORS["original_max_position_embeddings"] / wave - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - ramp) / factor + ramp)).float()


def _family_facts(config: dict[str, Any], file: GgufFile) -> None:
    """What a GGUF file leaves to the reader's knowledge of the family."""
    model_type, layers = config["model_type"], config["num_hidden_layers"]
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    elif model_type == "qwen3_moe":
        config["norm_topk_prob"] = True
        config.setdefault("moe_intermediate_size", file.tensors["blk.0.ffn_gate_exps.weight"].shape[1])
    elif model_type in ("gemma2", "gemma3_text"):
        # The 27B models scale by hidden / heads; llama.cpp knows them by their layer count, too.
        largest = layers == {"gemma2": 46, "gemma3_text": 62}[model_type]
        width = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        config["query_pre_attn_scalar"] = width
        every = 2 if model_type == "gemma2" else 6
        kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
        config["layer_types"] = kinds
        if model_type == "gemma3_text":
            local = {"rope_type": "default", "rope_theta": 10_000.0}
            config["rope_parameters"] = {
                "full_attention": config["rope_parameters"],
                "sliding_attention": local,
            }
