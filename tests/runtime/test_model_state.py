"""Case B53: a definition that changes something of its own in every step is refused by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from ostinato.errors import ModelError
from ostinato.runtime.compile import refuse_other_state
from tests.support.captured import capture_tiny
from tests.support.tiny_models import tiny_model

FORWARD = LlamaMLP.forward


def counts(mlp: Any, x: Tensor) -> Tensor:
    mlp.n += 1
    return FORWARD(mlp, x) * mlp.n


def counts_by_a_view(mlp: Any, x: Tensor) -> Tensor:
    mlp.n.view(-1)[0:1].add_(1)
    return FORWARD(mlp, x) * mlp.n


def overwrites(mlp: Any, x: Tensor) -> Tensor:
    mlp.n.copy_(x.mean()[None])
    return FORWARD(mlp, x) * mlp.n


def scales_its_weight(mlp: Any, x: Tensor) -> Tensor:
    mlp.up_proj.weight.mul_(0.5)
    return FORWARD(mlp, x)


def works_in_place(mlp: Any, x: Tensor) -> Tensor:
    made = FORWARD(mlp, x) * mlp.n
    made[..., :2] += 1
    return made.add_(1)


@pytest.fixture
def with_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    init = LlamaMLP.__init__

    def with_a_buffer(mlp: Any, *args: Any, **named: Any) -> None:
        init(mlp, *args, **named)
        mlp.register_buffer("n", torch.ones(1), persistent=False)

    def change(forward: Callable[..., Tensor]) -> None:
        monkeypatch.setattr(LlamaMLP, "__init__", with_a_buffer)
        monkeypatch.setattr(LlamaMLP, "forward", forward)

    return change


@pytest.mark.parametrize(
    ("forward", "name", "by"),
    [
        (counts, "layers.0.mlp.n", "add_"),
        (counts_by_a_view, "layers.0.mlp.n", "add_"),
        (overwrites, "layers.0.mlp.n", "copy_"),
        (scales_its_weight, "layers.0.mlp.up_proj.weight", "mul_"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_of_a_definition_is_refused_by_name(with_forward, forward, name: str, by: str):
    with_forward(forward)
    _, captured = capture_tiny(tiny_model("llama", num_hidden_layers=1).config)
    message = rf"LlamaForCausalLM: its definition changes (model\.)?{name} in every step \(by aten\.{by}"
    with pytest.raises(ModelError, match=message):
        refuse_other_state(captured)


def test_kv_planes_and_intermediate_results_may_be_written(with_forward):
    with_forward(works_in_place)
    _, captured = capture_tiny(tiny_model("llama", num_hidden_layers=1).config)
    refuse_other_state(captured)
