"""Tokenizer files of an artifact: a fast tokenizer.json, its config, chat template, generation config.

All of it happens at compile time; the serving process only opens tokenizer.json with the `tokenizers`
library.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ostinato.errors import ModelError

log = logging.getLogger(__name__)

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
# Pre-tokenizers of GGUF files that split as GPT-2 does, so that the direct conversion equals transformers'.
GPT2_SPLITS = ("default", "gpt-2", "smollm")
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types of GGUF


def write_from_folder(folder: Path, dest: Path, config: dict[str, Any]) -> None:
    """Copy the tokenizer of a model folder to `dest`; a slow one is converted by transformers first.

    Fallbacks: no tokenizer_config.json -> one is made from the special token ids of the config, with a
    warning; no chat template -> none is written (chat requests are then refused). Raises ModelError without a
    tokenizer.
    """
    dest.mkdir(parents=True, exist_ok=True)
    if (folder / "tokenizer.json").is_file():
        for name in COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, dest / name)
    elif any((folder / name).is_file() for name in SLOW):
        _convert_slow(folder, dest)
        if (folder / "generation_config.json").is_file():
            shutil.copyfile(folder / "generation_config.json", dest / "generation_config.json")
    else:
        raise ModelError(
            f"{folder}: no tokenizer; needed: tokenizer.json, or one of {', '.join(SLOW)}. "
            "Download it with the model, or take it from the base model"
        )
    tokenizer = open_tokenizer(dest / "tokenizer.json")
    settings = _settings(dest)
    if not settings:
        log.warning("%s: no tokenizer_config.json; special tokens are taken from config.json", folder)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for key in ("bos_token", "eos_token", "pad_token"):
            stated = config.get(f"{key}_id")
            index = next(iter(stated), None) if isinstance(stated, list) else stated
            if index is not None and (token := tokenizer.id_to_token(index)) is not None:
                settings[key] = token
        _write_json(dest / "tokenizer_config.json", settings)
    if (template := _default_template(settings)) and not (dest / "chat_template.jinja").exists():
        (dest / "chat_template.jinja").write_text(template, "utf-8")


def _default_template(settings: dict[str, Any]) -> str | None:
    """The chat template inside a tokenizer_config.json: a string, or the one named default in a list."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _convert_slow(folder: Path, dest: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (ValueError, OSError, ImportError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder}: no tokenizer.json, and transformers cannot convert the tokenizer: {error}; "
            "take tokenizer.json from the base model, or install what the message asks for"
        ) from error
    tokenizer.save_pretrained(str(dest))
    if not (dest / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder}: only a slow tokenizer ({type(tokenizer).__name__}), without a tokenizer.json form; "
            "take tokenizer.json from the base model"
        )


def open_tokenizer(path: Path) -> Tokenizer:
    """Parse a tokenizer.json. Raises ModelError if it is broken."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every broken file
        raise ModelError(f"{path}: broken tokenizer ({error}); download it again") from error


def special_token_id(folder: Path, key: str) -> int | None:
    """Id of `eos_token` or `bos_token` as the tokenizer config names it; None if it cannot be found."""
    token = _settings(folder).get(key)
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str) or not (folder / "tokenizer.json").is_file():
        return None
    return open_tokenizer(folder / "tokenizer.json").token_to_id(token)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); download it again") from error
    return settings if isinstance(settings, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")


def write_from_gguf(path: Path, metadata: dict[str, Any], dest: Path) -> None:
    """Build the tokenizer that a GGUF file describes; it encodes as transformers' own conversion does.

    A byte-level BPE with GPT-2's split is built directly (0.2 s); any other is left to transformers (5 to 10
    s).
    """
    dest.mkdir(parents=True, exist_ok=True)
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(
            f"{path}: the file has no tokenizer; convert the model to GGUF again, with its vocabulary"
        )
    tokenizer = _byte_level_bpe(metadata)
    if tokenizer is not None:
        tokenizer.save(str(dest / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        }
        tokens = metadata["tokenizer.ggml.tokens"]
        for key, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (index := metadata.get(f"tokenizer.ggml.{field}_token_id")) is not None and index < len(
                tokens
            ):
                settings[f"{key}_token"] = tokens[index]
        _write_json(dest / "tokenizer_config.json", settings)
    else:
        _convert_gguf(path, dest)
    if template := metadata.get("tokenizer.chat_template"):
        (dest / "chat_template.jinja").write_text(template, "utf-8")


def _convert_gguf(path: Path, dest: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(str(dest))
    except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path}: transformers cannot convert this tokenizer: {error}; "
            "use the safetensors folder of the model, which brings tokenizer.json"
        ) from error


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest move behind U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def _byte_level_bpe(metadata: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer, or None if the file needs more than byte-level BPE with GPT-2's split."""
    if metadata.get("tokenizer.ggml.model") != "gpt2" or "tokenizer.ggml.merges" not in metadata:
        return None
    if metadata.get("tokenizer.ggml.pre", "default") not in GPT2_SPLITS:
        return None
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    alphabet = set(byte_alphabet().values())
    if len(kinds) != len(tokens) or not all(alphabet.issuperset(token) for token in tokens):
        return None
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marked = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in marked if k == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, k in marked if k == USER_DEFINED]
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, bos)]
        )
    return tokenizer
