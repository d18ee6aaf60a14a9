"""Parameters of a transformers module as expressions over checkpoint tensors.

transformers renames, stacks, splits and permutes checkpoint tensors while it loads them. Its own rules are
used: its renaming functions give the names, and its conversion operations are run on recording tensors that
have a shape but no data, so that each operation leaves an expression instead of a result. Whatever a rule
does with the recording tensors must be known to recorded_tensor.py; anything else is refused by name.

Every checkpoint tensor is used, or named in one warning. Every parameter asked for gets an expression, or
ModelError.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ostinato.errors import ModelError
from ostinato.graph.recorded_tensor import RecordedTensor
from ostinato.graph.source import ModelSource
from ostinato.ops.weight_expr import Expr, cast, load, sources

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

Spec = tuple[tuple[int, ...], torch.dtype]


def weight_exprs(
    param_specs: Mapping[str, Spec],
    tied: Mapping[str, str],
    source: ModelSource,
    config: PretrainedConfig,
    *,
    model: PreTrainedModel | None = None,
) -> dict[str, Expr]:
    """One expression for each name of `param_specs`, of exactly that shape and number type.

    `tied` maps a name to the one it shares its tensor with. `model` is the module as built (its parameters
    need no data); without it the module is built on the meta device. Raises ModelError for a parameter that
    no tensor fills, a wrong shape, a number type that is not a float where one is needed, an unknown
    conversion.
    """
    model = model if model is not None else _meta_model(config)
    filled, unused = _filled(model, source, param_specs)
    if unused:
        log.warning(
            "%s: %d tensors are not used by %s: %s%s",
            source.path,
            len(unused),
            type(model).__name__,
            ", ".join(unused[:5]),
            ", ..." if len(unused) > 5 else "",
        )
    if differing := _differing_ties(tied, filled, source):
        raise ModelError(
            f"{source.path}: {', '.join(differing)} differs from the tensor that the config ties it to; "
            "set tie_word_embeddings to false in its config"
        )
    groups = _tie_groups(tied)
    result: dict[str, Expr] = {}
    missing = []
    for name, (shape, dtype) in param_specs.items():
        partner = next((other for other in (name, *groups.get(name, ())) if other in filled), None)
        if partner is None:
            missing.append(name)
        else:
            result[name] = _checked(name, filled[partner], shape, dtype, source)
    if missing:
        raise ModelError(
            f"{source.path}: no tensor fills {len(missing)} parameters of {type(model).__name__}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; the checkpoint is incomplete "
            "or of another model: download it again (ostinato never starts with random weights)"
        )
    return result


def _differing_ties(
    tied: Mapping[str, str], filled: Mapping[str, RecordedTensor], source: ModelSource
) -> list[str]:
    """Tied names that the checkpoint fills with other values than their partner."""
    differing = []
    for name, other in tied.items():
        if name in filled and other in filled:
            ours, theirs = (list(sources(filled[key].expr)) for key in (name, other))
            if ours == theirs:
                continue
            if (
                len(ours) != 1
                or len(theirs) != 1
                or not torch.equal(source.read(ours[0]), source.read(theirs[0]))
            ):
                differing.append(name)
    return differing


def _tie_groups(tied: Mapping[str, str]) -> dict[str, list[str]]:
    """Name -> every other name of its tensor, so that whichever the checkpoint holds can fill it."""
    groups: dict[str, list[str]] = {}
    for name, other in tied.items():
        group = {name, other, *groups.get(name, ()), *groups.get(other, ())}
        for member in group:
            groups[member] = sorted(group - {member})
    return groups


def _meta_model(config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _filled(
    model: PreTrainedModel, source: ModelSource, param_specs: Mapping[str, Spec]
) -> tuple[dict[str, RecordedTensor], list[str]]:
    """Recorded tensor of each module tensor that the checkpoint fills, and the tensors left over."""
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = model.base_model_prefix
    filled: dict[str, RecordedTensor] = {}
    unused: list[str] = []
    converting: dict[str, Any] = {}  # first target name -> its own copy of transformers' converter
    for name in sorted(source.tensor_names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # it already has its final name
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unused.append(name)
            continue
        shape, file_dtype = source.tensor_spec(name)
        dtype = param_specs[target][1] if target in param_specs else state[target].dtype
        expr = load(name) if dtype == file_dtype else cast(load(name), dtype)
        if dtype.is_floating_point and file_dtype not in _FLOATS:
            raise ModelError(
                f"{source.path}: tensor {name} is {file_dtype}, a quantised weight; use the unquantised model"
            )
        recorded = RecordedTensor(expr, shape, dtype)
        if pattern is not None:
            converter = converting.setdefault(target, deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, recorded)
        elif target in filled:
            raise ModelError(
                f"{source.path}: {name} and {next(sources(filled[target].expr))} are both {target}; "
                "remove one of them"
            )
        else:
            filled[target] = recorded
    for target, converter in converting.items():
        filled.update(_convert(target, converter, model, source))
    return filled, unused


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _convert(
    target: str, converter: Any, model: PreTrainedModel, source: ModelSource
) -> dict[str, RecordedTensor]:
    """Run transformers' converter for one target on recording tensors."""
    try:
        made = converter.convert(target, model=model, config=model.config)
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError, AttributeError) as error:
        names = [type(operation).__name__ for operation in converter.operations]
        raise ModelError(
            f"{source.path}: the tensors of {target} cannot be combined by {', '.join(names)}: {error}; "
            "the checkpoint does not fit its config"
        ) from error
    result = {}
    for name, value in made.items():
        value = value[0] if isinstance(value, list) else value
        if not isinstance(value, RecordedTensor):
            names = [type(operation).__name__ for operation in converter.operations]
            raise ModelError(f"{source.path}: {name}: conversion {', '.join(names)} is not known to ostinato")
        result[name] = value
    return result


def _checked(
    name: str, recorded: RecordedTensor, shape: tuple[int, ...], dtype: torch.dtype, source: ModelSource
) -> Expr:
    found = tuple(recorded.shape)
    if found != tuple(shape):
        raise ModelError(
            f"{source.path}: {next(sources(recorded.expr))} gives {name} shape {list(found)}, "
            f"but the config asks for {list(shape)}; config and weights are of different models"
        )
    return recorded.expr if recorded.dtype == dtype else cast(recorded.expr, dtype)
