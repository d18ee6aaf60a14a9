"""Build an unmodified transformers causal LM without its weights: parameters are fake, buffers are real."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from ostinato.errors import EngineError, ModelError
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


def build_model(config: Any, dtype: torch.dtype, hooks: CaptureHooks) -> BuiltModel:
    """Instantiate the class that transformers' `config` names, for number type `dtype`.

    Raises ModelError when it is no causal language model that transformers defines.
    """
    import transformers
    from transformers.initialization import no_init_weights

    architecture = _architecture(config)
    model_class = getattr(transformers, architecture, None)
    if model_class is None or not architecture.endswith("ForCausalLM"):
        raise ModelError(
            f"config.json: architectures={config.architectures!r}: only causal language models that "
            f"transformers {transformers.__version__} defines (names that end in ForCausalLM) can be compiled"
        )
    config.use_cache = False
    _refuse_length_dependent_rope(config.to_dict())
    try:
        with hooks.registered(), no_init_weights(), _EmptyOnMeta(), torch.no_grad():
            kwargs: dict[str, Any] = {"dtype": dtype, "attn_implementation": IMPLEMENTATION}
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


def _architecture(config: Any) -> str:
    if config.architectures:
        return str(config.architectures[0])
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise ModelError(
            f"config.json: model_type={config.model_type!r} has no causal language model in transformers"
        )
    return str(name if isinstance(name, str) else name[0])


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
