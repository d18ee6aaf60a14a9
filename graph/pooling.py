"""What a model folder says about pooling: is it for embeddings or scores, and how are they made?

Read are the files of sentence-transformers (modules.json and the folders that it names, sentence_bert_config,
config_sentence_transformers) and the config of the model. What would change the result and is not known here
is refused by name.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ostinato.errors import ConfigError, ModelError
from ostinato.graph.checkpoint import read_header, read_tensors
from ostinato.graph.config import GraphConfig
from ostinato.graph.facts import PoolingMode
from ostinato.graph.source import ModelSource
from ostinato.graph.source_hf import read_json

log = logging.getLogger(__name__)

MODULES = "modules.json"
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "cls": "cls",
}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU}


class Dense(NamedTuple):
    """A linear layer behind the pooling, [out, in], with a bias or without."""

    weight: Tensor
    bias: Tensor | None
    activation: str


class PoolingPlan(NamedTuple):
    """What is to be made of a model's hidden states."""

    task: Literal["embed", "score"]
    pooling: PoolingMode | None  # None: the folder does not say
    normalize: bool
    dense: tuple[Dense, ...]
    max_tokens: int | None  # longest input, if the folder limits it
    matryoshka: tuple[int, ...]


def pooling_plan(source: ModelSource, config: GraphConfig) -> PoolingPlan | None:
    """None: a model that generates. Raises ModelError for what cannot be carried, ConfigError."""
    task = config.task if config.task != "auto" else _task(source)
    wanted = None if config.pooling == "auto" else config.pooling
    if wanted is not None and task != "embed":
        raise ConfigError(
            f"graph.pooling={wanted}: {source.path.name} is a model to {task} with, and only those to embed "
            "with are pooled so; drop it, or set graph.task=embed"
        )
    if task == "generate":
        return None
    folder = source.path if source.kind == "hf" else None
    limit = _max_tokens(folder) if folder is not None else None
    if task == "score":
        return PoolingPlan("score", wanted, False, (), limit, ())
    if folder is None or not (folder / MODULES).is_file():
        return PoolingPlan("embed", wanted, True, (), limit, _matryoshka(source))
    pooling, normalize, dense = _read_modules(folder)
    _warn_of_text_rules(folder)
    return PoolingPlan("embed", wanted or pooling, normalize, dense, limit, _matryoshka(source))


def _warn_of_text_rules(folder: Path) -> None:
    """What sentence-transformers does to texts before they are tokenised, and we do not."""
    if name := read_json(folder / "config_sentence_transformers.json").get("default_prompt_name"):
        log.warning("%s: the prompt %r is not put in front of inputs; send it with them", folder, name)
    if read_json(folder / "sentence_bert_config.json").get("do_lower_case"):
        log.warning("%s: do_lower_case is left to tokenizer.json; send lower case if that keeps it", folder)


def _task(source: ModelSource) -> str:
    """What the folder is for, if nobody says it: sentence-transformers' file, then the architecture."""
    if source.kind == "hf" and (source.path / MODULES).is_file():
        return "embed"
    stated = source.config.get("architectures") or [""]
    name = str(stated[0]) if isinstance(stated, list) else ""
    if name.endswith("ForSequenceClassification"):
        return "score"
    return "embed" if name.endswith(("Model", "ForMaskedLM", "ForPreTraining")) else "generate"


def _read_modules(folder: Path) -> tuple[PoolingMode | None, bool, tuple[Dense, ...]]:
    """Pooling, normalisation and dense layers of a sentence-transformers folder."""
    pooling: PoolingMode | None = None
    normalize, dense = False, list[Dense]()
    for at, (kind, path) in enumerate(_modules(folder)):
        if kind == "Transformer" and at == 0 and path in ("", "."):
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _mode(folder / path / "config.json")
        elif kind == "Dense" and pooling is not None and not normalize:
            dense.append(_dense(folder / path))
        elif kind == "Normalize":
            normalize = True
        else:
            raise ModelError(
                f"{folder / MODULES}: module {at} is {kind!r}; readable are Transformer, Pooling, Dense and "
                "Normalize, in this order"
            )
    return pooling, normalize, tuple(dense)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class and path of each module, in order."""
    content = read_json(folder / MODULES, kind=list)
    try:
        listed = sorted(content, key=lambda module: module["idx"])
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder / MODULES}: broken ({error!r}); download it again") from error
    for _, path in found:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelError(f"{folder / MODULES}: {path!r} leads out of the model folder; check the file")
    return found


def _mode(path: Path) -> PoolingMode:
    stated = read_json(path, needed=True)
    modes = [name for name, is_on in stated.items() if name.startswith("pooling_mode_") and is_on is True]
    if isinstance(single := stated.get("pooling_mode"), str):
        modes = [single]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{path}: pooling {', '.join(modes) or 'of no kind'} cannot be carried; known are one of "
            "mean, lasttoken and cls"
        )
    return _MODES[modes[0]]


def _dense(folder: Path) -> Dense:
    stated = read_json(folder / "config.json", needed=True)
    activation = str(stated.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"{folder / 'config.json'}: activation_function {activation!r} cannot be carried; "
            f"known: {', '.join(_ACTIVATIONS)}"
        )
    path = folder / "model.safetensors"
    places = read_header(path)
    shape = (stated.get("out_features"), stated.get("in_features"))
    if "linear.weight" not in places or places["linear.weight"].shape != shape:
        raise ModelError(f"{path}: no linear.weight of shape {list(shape)}; download it again")
    tensors = read_tensors(places)
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def dense_layers(plan: PoolingPlan, dtype: torch.dtype) -> nn.Sequential:
    """The dense layers behind the pooling, with their weights, in `dtype`."""
    layers: list[nn.Module] = []
    for one in plan.dense:
        linear = nn.Linear(one.weight.shape[1], one.weight.shape[0], bias=one.bias is not None, device="meta")
        linear.weight = nn.Parameter(one.weight.to(dtype), requires_grad=False)
        if one.bias is not None:
            linear.bias = nn.Parameter(one.bias.to(dtype), requires_grad=False)
        layers += [linear, _ACTIVATIONS[one.activation]()]
    return nn.Sequential(*layers)


def _max_tokens(folder: Path) -> int | None:
    stated = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return stated if isinstance(stated, int) and stated > 0 else None


def _matryoshka(source: ModelSource) -> tuple[int, ...]:
    stated: Any = source.config.get("matryoshka_dimensions") or ()
    return tuple(sorted(size for size in stated if isinstance(size, int) and size > 0))
