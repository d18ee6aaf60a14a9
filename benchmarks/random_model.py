"""Models of real shapes with random weights: what speed needs, where real weights cannot be had.

A `RandomSource` is a model source without files: every tensor is drawn when it is read, the same each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from ostinato.graph.source import DTYPES

# The published config of Llama-3.1-8B, less what only its tokenizer needs.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "bos_token_id": 128000,
    "dtype": "bfloat16",
}
SMOL_135M: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
SHAPES = {"llama-8b": LLAMA_8B, "smollm2-135m": SMOL_135M}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SPREAD = 0.02  # standard deviation of a weight, as such models are initialised with


class RandomSource:
    """A `ModelSource` of a config alone. Tensors are drawn on `device` and given on the CPU."""

    kind: Literal["hf", "gguf"] = "hf"

    def __init__(self, config: Mapping[str, Any], name: str, device: str = "cpu") -> None:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        self.path, self.config, self._device = Path(name), dict(config), device
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**config))
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self._dtype = DTYPES[config["dtype"]]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(["random", self.config], sort_keys=True).encode()).hexdigest()

    def tensor_names(self) -> list[str]:
        return list(self._shapes)

    def tensor_spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._shapes[name], self._dtype

    def read(self, name: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        generator = torch.Generator(self._device).manual_seed(seed)
        shape = self._shapes[name]
        drawn = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        return (1 + SPREAD * drawn if len(shape) == 1 else SPREAD * drawn).cpu()

    def write_tokenizer(self, dest: Path) -> None:
        """As many tokens and merges as the model has ids, and a chat template: loading takes as long."""
        dest.mkdir(parents=True)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = list(product(letters, letters))
        triples = ((first + second, third) for (first, second), third in product(pairs, letters))
        merges = list(islice(chain(pairs, triples), self.config["vocab_size"] - len(letters)))
        tokens = chain(letters, (left + right for left, right in merges))
        tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(dest / "tokenizer.json"))
        (dest / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (dest / "chat_template.jinja").write_text(TEMPLATE)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (self.config["eos_token_id"],)

    @property
    def bos_token_id(self) -> int | None:
        return int(self.config["bos_token_id"])
