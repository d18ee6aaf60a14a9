"""A GGUF file as a Hugging Face model: config from its metadata, tensors under their transformers names.

llama.cpp's converters change some weights; this undoes it: rows of llama's q and k are put back from
interleaved to half-rotated order, Gemma's norm weights lose the one that was added, stacked experts appear
one by one. A metadata key of the architecture that is not known here could change the math, so it is refused
by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import ModelError
from ostinato.graph import tokenizer_files
from ostinato.graph.gguf_config import FAMILIES, hf_config
from ostinato.graph.gguf_file import MAGIC as GGUF_MAGIC
from ostinato.graph.gguf_file import GgufFile
from ostinato.graph.source_hf import sample

__all__ = ["GGUF_MAGIC", "GgufSource"]

ROPE_FACTORS = "rope_freqs.weight"  # goes into the config, see gguf_config


class _Origin(NamedTuple):
    """Where a Hugging Face tensor comes from: GGUF name, and the expert if it is one of a stack."""

    name: str
    expert: int | None = None


class GgufSource:
    """See `ModelSource`. Every tensor reads as float32, bit-equal to transformers' own dequantisation."""

    kind: Literal["hf", "gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufFile(path)
        metadata = self.file.metadata
        architecture = metadata.get("general.architecture")
        if architecture not in FAMILIES:
            raise ModelError(
                f"{path}: GGUF architecture {architecture!r}; readable: {', '.join(FAMILIES)}. "
                "Use the safetensors folder of the model"
            )
        if int(metadata.get("split.count", 1)) > 1:
            raise ModelError(
                f"{path}: one of {metadata['split.count']} parts; "
                "join them first: llama-gguf-split --merge FIRST OUT"
            )
        self.family = FAMILIES[architecture]
        self.config = hf_config(self.file, self.family)
        self._origins = {hf: origin for name in self.file.tensors for hf, origin in self._named(name)}

    def _named(self, name: str) -> list[tuple[str, _Origin]]:
        """Hugging Face names of one GGUF tensor; an unknown one keeps its name and is listed as unused."""
        if name == ROPE_FACTORS:
            return []
        if match := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", name):
            layer, projection = match.groups()
            return [
                (f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight", _Origin(name, expert))
                for expert in range(self.file.tensors[name].shape[0])
            ]
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            layer, stem, leaf = match.groups()
            if stem in self.family.layer_names:
                return [(f"model.layers.{layer}.{self.family.layer_names[stem]}.{leaf}", _Origin(name))]
        outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        stem, _, leaf = name.rpartition(".")
        return [(f"{outer[stem]}.{leaf}" if stem in outer else name, _Origin(name))]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over what `ModelSource` lists; the header holds config and tokenizer."""
        digest = hashlib.sha256(self.file.memory[: self.file.data_start])
        digest.update(str(len(self.file.memory)).encode())
        with self.path.open("rb") as stream:
            for tensor in self.file.tensors.values():
                digest.update(sample(stream, tensor.start, tensor.stop))
        return digest.hexdigest()

    def tensor_names(self) -> list[str]:
        return list(self._origins)

    def tensor_spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        origin = self._origins[name]
        shape = self.file.tensors[origin.name].shape
        return (shape if origin.expert is None else shape[1:]), torch.float32

    def read(self, name: str) -> Tensor:
        origin = self._origins[name]
        made = self.file.read(origin.name, origin.expert)
        if self.family.permuted and ".attn_q." in origin.name:
            return _half_rotated(made, self.config["num_attention_heads"])
        if self.family.permuted and ".attn_k." in origin.name:
            return _half_rotated(made, self.config["num_key_value_heads"])
        if self.family.norm_plus_one and origin.name.endswith("norm.weight"):
            return made - 1
        return made

    def write_tokenizer(self, dest: Path) -> None:
        tokenizer_files.write_from_gguf(self.path, self.file.metadata, dest)
        defaults = {"bos_token_id": self.bos_token_id, "eos_token_id": list(self.eos_token_ids)}
        (dest / "generation_config.json").write_text(json.dumps(defaults, indent=2), "utf-8")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        found = (self.file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(int(index) for index in found if index is not None))

    @property
    def bos_token_id(self) -> int | None:
        index = self.file.metadata.get("tokenizer.ggml.bos_token_id")
        return None if index is None else int(index)


def _half_rotated(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of the rows of each head: (0, n/2, 1, n/2 + 1, ...) back to (0, 1, ...)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
