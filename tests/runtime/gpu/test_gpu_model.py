"""How a step of one token splits L1: by the ways of its layers, as they were measured."""

import pytest
import torch

from ostinato.ops import tuning
from ostinato.ops.tuning import BY_PARTS, Choice, Shape
from ostinato.runtime.gpu.gpu_model import layer_shapes, share_of_l1
from ostinato.runtime.program import Program, Step

QKV, DOWN, GATE = (
    Shape("skinny_linear", 1, 96, 64, "bfloat16"),
    Shape("skinny_linear", 1, 64, 80, "bfloat16"),
    Shape("skinny_gated", 1, 80, 64, "bfloat16"),
)
TRITON, TILE = Choice(config={"rows": 2}), Choice(tile={"rows": 64})


@pytest.mark.parametrize(
    ("choices", "percent"),
    [
        ({QKV: TILE, DOWN: TRITON, GATE: TRITON}, 75),
        ({QKV: TILE, DOWN: TILE, GATE: TILE}, 100),
        ({QKV: TRITON, DOWN: TRITON, GATE: TRITON}, 100),
        ({QKV: TILE, DOWN: BY_PARTS}, 100),
        ({QKV: TILE, Shape("skinny_linear", 1, 7, 7, "bfloat16"): TRITON}, 100),  # of another model
        ({}, 100),
    ],
)
def test_a_mix_of_triton_and_tiles_gives_each_a_part(choices: tuning.Choices, percent: int) -> None:
    assert share_of_l1({QKV, DOWN, GATE}, choices) == percent


def test_the_layers_of_a_program_are_those_of_its_weights() -> None:
    def step(op: str, weight: str) -> Step:
        return Step(op=f"ostinato.{op}.default", args=[{"ref": "x"}, {"ref": weight}], out=f"{weight}_out")

    program = Program(
        step_inputs=(),
        kv=(),
        weights={"a": "layer.qkv", "b": "layer.gate_up", "c": "layer.down", "d": "norm"},
        steps=(
            step("skinny_linear", "a"),
            step("skinny_gated", "b"),
            step("skinny_linear", "c"),
            step("rms_norm", "d"),
            step("skinny_linear", "made_on_the_way"),
        ),
        result="c_out",
    )
    sizes = {"layer.qkv": (96, 64), "layer.gate_up": (160, 64), "layer.down": (64, 80), "norm": (64,)}
    tensors = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    assert layer_shapes(program, tensors) == {QKV, GATE, DOWN}
