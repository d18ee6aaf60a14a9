"""Where a model comes from: a Hugging Face folder or a GGUF file, behind one protocol."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ostinato.errors import LFS_POINTER, ModelError, is_pointer, no_such_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "rope_local_base_freq")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Their residual stream passes 65504, the largest float16, so logits become NaN (transformers issue 34759).
OVERFLOWS_FLOAT16 = ("gemma",)


class ModelSource(Protocol):
    """A model as its files describe it. Opening one verifies the files; nothing is executed.

    `config` is a dict with the names of a Hugging Face config.json (`model_type` is always there). Tensor
    names are those of a Hugging Face checkpoint. `fingerprint` changes with the config, the tokenizer files,
    the name, size and layout of each weight file, and the first and last 4 KiB of every tensor; it is no hash
    of all the data, so that it stays cheap for large models.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    config: dict[str, Any]

    @property
    def fingerprint(self) -> str: ...

    def tensor_names(self) -> Sequence[str]: ...

    def tensor_spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and number type that `read` will give."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU; GGUF weights are dequantised to float32. Do not write to it."""
        ...

    def write_tokenizer(self, dest: Path) -> None:
        """Write tokenizer.json, its config and, if known, chat_template.jinja and generation_config.json."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a text: generation config, then config, then tokenizer, without repeats."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...


def open_source(path: str | Path) -> ModelSource:
    """Open a model folder or a .gguf file. Raises ModelError that names what is missing or broken."""
    from ostinato.graph.source_gguf import GGUF_MAGIC, GgufSource  # each import costs only those who need it
    from ostinato.graph.source_hf import HfSource

    path = Path(path).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists() and (ggufs := sorted(path.glob("*.gguf"))):
            if len(ggufs) == 1:
                return GgufSource(ggufs[0])
            raise ModelError(
                f"{path}: several GGUF files ({', '.join(p.name for p in ggufs)}); name one of them"
            )
        return HfSource(path)
    if path.is_file():
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
        if begin.startswith(GGUF_MAGIC):
            return GgufSource(path)
        if begin == LFS_POINTER:
            raise ModelError(is_pointer(path))
        raise ModelError(
            f"{path}: not a model; give a folder with config.json and safetensors, or a GGUF file"
        )
    raise ModelError(no_such_path(path))


def load_config(source: ModelSource) -> PretrainedConfig:
    """The transformers config object of a source; unknown architectures and quantised weights are refused.

    Code that comes with a model folder is never run.

    A config without any rotary field gets transformers' default for its family, with a warning that shows it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type, quantization = source.config["model_type"], source.config.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        )
        raise ModelError(
            f"{source.path}: quantised checkpoint (quantization_config.quant_method={method}); "
            "use the unquantised checkpoint or a GGUF file"
        )
    try:
        if model_type in CONFIG_MAPPING:
            config = CONFIG_MAPPING[model_type].from_dict(source.config)
        else:
            raise ModelError(
                f"{source.path}: unknown architecture {model_type!r}: not in the installed transformers; "
                "a newer one may know it (code that comes with a model folder is never run)"
            )
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:
        raise ModelError(
            f"{source.path}: transformers refuses the config: {error}; correct config.json"
        ) from error
    if _untied_head(config, source):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    text = config.get_text_config()
    layers, tensors = text.num_hidden_layers, len(source.tensor_names())
    if not 1 <= layers <= tensors:
        raise ModelError(
            f"{source.path}: num_hidden_layers={layers} in the config, but the files hold {tensors} tensors; "
            "it must be at least 1, and every layer has tensors of its own: correct the config"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise ModelError(
            f"{source.path}: max_position_embeddings={positions} in the config leaves no "
            "room for a prompt and an answer; correct the config"
        )
    stated = {**source.config, **(source.config.get("text_config") or {})}
    if getattr(text, "rope_parameters", None) and not any(stated.get(field) for field in ROPE_FIELDS):
        log.warning(
            "%s: no rotary field in the config; transformers' default for %s is used: %s",
            source.path,
            model_type,
            text.rope_parameters,
        )
    return config


def _untied_head(config: PretrainedConfig, source: ModelSource) -> bool:
    """Does the config tie the head to the embedding although the files hold a head of its own?

    As in transformers, that head is then used, with a warning.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return False
    names = source.tensor_names()
    heads = [name for name in names if name.rpartition("lm_head.")[2] == "weight" and "lm_head." in name]
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    if (
        len(heads) != 1
        or len(embeddings) != 1
        or torch.equal(source.read(heads[0]), source.read(embeddings[0]))
    ):
        return False
    log.warning(
        "%s: the config ties %s to %s, but the files hold different values for it, which are used; "
        "set tie_word_embeddings to false in the config to silence this",
        source.path,
        heads[0],
        embeddings[0],
    )
    return True


def resolve_dtype(choice: str, source: ModelSource) -> torch.dtype:
    """Number type of weights and activations; logged once.

    auto: the config's `dtype` (or `torch_dtype`), else the type that most bytes of the files have; quantised
    GGUF files count as float32. float16 is refused for families that overflow it. Anything else runs as
    asked; bfloat16 runs on every CPU, slowly where the hardware lacks it.
    """
    reason = f"graph.dtype={choice}"
    if choice == "auto":
        config = {**source.config, **(source.config.get("text_config") or {})}
        choice = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        reason = "dtype in the config"
        if not choice:
            sizes: Counter[str] = Counter()
            for name in source.tensor_names():
                shape, dtype = source.tensor_spec(name)
                sizes[str(dtype).removeprefix("torch.")] += torch.Size(shape).numel() * dtype.itemsize
            choice, reason = sizes.most_common(1)[0][0] if sizes else "float32", "type of the weight files"
    if choice not in DTYPES:
        raise ModelError(
            f"{source.path}: number type {choice} ({reason}) is not supported; "
            f"set graph.dtype to one of {', '.join(DTYPES)}"
        )
    if choice == "float16" and source.config["model_type"].startswith(OVERFLOWS_FLOAT16):
        raise ModelError(
            f"{source.path}: {source.config['model_type']} overflows float16 ({reason}) and would give NaN; "
            "set graph.dtype to bfloat16 or float32"
        )
    log.info("number type %s (%s)", choice, reason)
    return DTYPES[choice]
