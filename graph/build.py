"""Build an unmodified transformers model without its weights: parameters are fake, buffers are real."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from ostinato.errors import EngineError, ModelError
from ostinato.graph.facts import Task
from ostinato.graph.hooks import IMPLEMENTATION, CaptureHooks


class BuiltModel(NamedTuple):
    """A model ready for tracing."""

    model: nn.Module
    config: Any  # transformers' own config object
    fake_mode: FakeTensorMode
    params: dict[
        str, tuple[tuple[int, ...], torch.dtype]
    ]  # checkpoint-backed tensors, tied ones under one name
    tied: dict[str, str]  # other name -> name in `params`
    constants: dict[str, torch.Tensor]  # buffers that the model computes itself, e.g. inv_freq


class _EmptyOnMeta(TorchFunctionMode):
    """Send uninitialised allocations (the weights) to the meta device; computed buffers stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.Tensor.new_empty):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_model(
    config: Any,
    dtype: torch.dtype,
    hooks: CaptureHooks,
    *,
    task: Task = "generate",
) -> BuiltModel:
    """Instantiate the class that transformers' `config` names, for number type `dtype`.

    To embed, that is the family's class without a head. Raises ModelError when transformers defines no class
    for the task.
    """
    from transformers.initialization import no_init_weights

    model_class = _model_class(config, task)
    architecture = model_class.__name__
    config.use_cache = False
    _refuse_length_dependent_rope(config.to_dict())
    try:
        with hooks.registered(), no_init_weights(), _EmptyOnMeta(), torch.no_grad():
            kwargs: dict[str, Any] = {"dtype": dtype, "attn_implementation": IMPLEMENTATION}
            if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
                kwargs["add_pooling_layer"] = False  # its weights are in few checkpoints, its result in none
            model = model_class._from_config(config, **kwargs)
            if hooks.has_experts(model):
                model.set_experts_implementation(IMPLEMENTATION)
    except EngineError:
        raise
    except Exception as error:  # border: a size that makes no sense fails in any way, deep in transformers
        raise ModelError(
            f"config.json: transformers cannot build {architecture} from it "
            f"({type(error).__name__}: {error}); correct the config"
        ) from error
    model.eval().requires_grad_(False)
    model.tie_weights()
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    params, tied = _replace_parameters(model, fake_mode)
    constants = {}
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            params[name] = (tuple(buffer.shape), buffer.dtype)
        elif buffer.is_meta:
            raise ModelError(
                f"{architecture}: buffer {name} has no value before weights are loaded; cannot be carried"
            )
        else:
            constants[name] = buffer.detach().clone()
    return BuiltModel(model, config, fake_mode, params, tied, constants)


def _refuse_length_dependent_rope(config: Any, where: str = "config.json") -> None:
    """Dynamic NTK and LongRoPE choose frequencies by the sequence length, of which a batch has many."""
    if isinstance(config, dict):
        kind = config.get("rope_type") or config.get("type")
        if kind in ("dynamic", "longrope"):
            raise ModelError(
                f"{where}: rope_type={kind!r} depends on the sequence length and cannot be carried"
            )
        for key, value in config.items():
            _refuse_length_dependent_rope(value, f"{where}: {key}")


_SUFFIX: dict[Task, str] = {"generate": "ForCausalLM", "embed": "Model", "score": "ForSequenceClassification"}


def _model_class(config: Any, task: Task) -> Any:
    """transformers' class for a task: the one that the config names, if it is for it, or the family's."""
    import transformers
    from transformers.models.auto import modeling_auto

    suffix = _SUFFIX[task]
    stated = str(config.architectures[0]) if config.architectures else ""
    if stated and not stated.endswith(suffix) and task != "embed":
        raise ModelError(
            f"config.json: architectures={config.architectures!r}: to {task}, a model needs a class of "
            f"transformers {transformers.__version__} whose name ends in {suffix}. Names that end in Model "
            "or ForMaskedLM are for graph.task=embed, in ForSequenceClassification for graph.task=score"
        )
    names = {
        "generate": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "embed": modeling_auto.MODEL_MAPPING_NAMES,
        "score": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }[task]
    if not stated.endswith(suffix):
        found = names.get(config.model_type)
        stated = str(found if isinstance(found, str) or found is None else found[0])
    model_class = getattr(transformers, stated, None)
    if model_class is None:
        raise ModelError(
            f"config.json: model_type={config.model_type!r} has no class in transformers "
            f"{transformers.__version__} to {task} with (architectures={config.architectures!r})"
        )
    return model_class


def _replace_parameters(
    model: nn.Module, fake_mode: FakeTensorMode
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, str]]:
    params: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    tied: dict[str, str] = {}
    made: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if id(parameter) in made:
            first, fake = made[id(parameter)]
            tied[name] = first
        else:
            with fake_mode:
                fake = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False)
            made[id(parameter)] = (name, fake)
            made[id(fake)] = (name, fake)
            params[name] = (tuple(parameter.shape), parameter.dtype)
        owner._parameters[leaf] = fake
    return params, tied
