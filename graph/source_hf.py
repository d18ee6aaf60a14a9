"""A Hugging Face model folder: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ostinato.errors import ModelError
from ostinato.graph import tokenizer_files
from ostinato.graph.checkpoint import Checkpoint

SAMPLE_BYTES = 4096
# Of sentence-transformers: what is done with the hidden states; see pooling.py.
SENTENCE_FILES = ("modules.json", "sentence_bert_config.json")
POOLING_FILES = "[0-9]_*/*.*"


class HfSource:
    """See `ModelSource`. Opening reads the config and verifies the weight files; no weight is read."""

    kind: Literal["hf", "gguf"] = "hf"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_json(folder / "config.json", needed=True)
        if not isinstance(self.config.get("model_type"), str):
            raise ModelError(
                f"{folder / 'config.json'}: no model_type; it is not the config of a transformers model"
            )
        self.checkpoint = Checkpoint(folder)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return read_json(self.path / "generation_config.json")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over what `ModelSource` lists."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        pooling = sorted(str(path.relative_to(self.path)) for path in self.path.glob(POOLING_FILES))
        for name in (*tokenizer_files.COPIED, *tokenizer_files.SLOW, *SENTENCE_FILES, *pooling):
            if (self.path / name).is_file():
                digest.update(name.encode() + hashlib.sha256((self.path / name).read_bytes()).digest())
        for file in self.checkpoint.files:
            digest.update(f"{file.name} {file.stat().st_size}".encode())
        for name, place in self.checkpoint.places.items():
            digest.update(f"{name} {place.file.name} {place.shape} {place.dtype} {place.start}".encode())
        for file in self.checkpoint.files:
            with file.open("rb") as stream:
                for place in self.checkpoint.places.values():
                    if place.file == file:
                        digest.update(sample(stream, place.start, place.stop))
        return digest.hexdigest()

    def tensor_names(self) -> list[str]:
        return list(self.checkpoint.places)

    def tensor_spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        place = self.checkpoint.places[name]
        return place.shape, place.dtype

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name)

    def write_tokenizer(self, dest: Path) -> None:
        tokenizer_files.write_from_folder(self.path, dest, self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        text = self.config.get("text_config") or {}
        found: list[int] = []
        for stated in (
            self.generation_config.get("eos_token_id"),
            self.config.get("eos_token_id"),
            text.get("eos_token_id"),
            tokenizer_files.special_token_id(self.path, "eos_token"),
        ):
            found += stated if isinstance(stated, list) else [stated] if isinstance(stated, int) else []
        return tuple(dict.fromkeys(found))

    @property
    def bos_token_id(self) -> int | None:
        text = self.config.get("text_config") or {}
        for stated in (
            self.generation_config.get("bos_token_id"),
            self.config.get("bos_token_id"),
            text.get("bos_token_id"),
            tokenizer_files.special_token_id(self.path, "bos_token"),
        ):
            if isinstance(stated, int):
                return stated
        return None


def sample(stream: Any, start: int, stop: int) -> bytes:  # Any: a binary file, IO[bytes] or BufferedReader
    """First and last bytes of a range of an open file, for the fingerprint."""
    stream.seek(start)
    head: bytes = stream.read(min(SAMPLE_BYTES, stop - start))
    stream.seek(max(start, stop - SAMPLE_BYTES))
    return head + stream.read(min(SAMPLE_BYTES, stop - start))


def read_json(path: Path, *, needed: bool = False, kind: type = dict) -> Any:  # Any: of that kind
    """Content of a JSON file of a model folder; empty if it is absent and not needed. Raises ModelError."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return kind()
        raise ModelError(
            f"{path}: missing; a model folder needs it. Finish the download of the model"
        ) from error
    except (OSError, RecursionError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, kind):
        wanted = "an object" if kind is dict else f"a {kind.__name__}"
        raise ModelError(f"{path}: {type(content).__name__} instead of {wanted}; download it again")
    return content
