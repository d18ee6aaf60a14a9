"""What `compile-model` says at its end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ostinato.ops import tuning
from ostinato.tools.compile_model import measured_layers, proof_line


def test_measured_layers_are_told_where_a_compile_has_measured_some(tmp_path: Path) -> None:
    assert measured_layers(tmp_path) == []  # of a CPU
    tuning.add(tmp_path / tuning.FILE, [])
    assert measured_layers(tmp_path) == []  # all in the GPU's table
    tuning.add(tmp_path / tuning.FILE, [], measured={"shapes": 45, "not_default": 12, "seconds": 20.5})
    assert measured_layers(tmp_path) == [
        "linear layers: 45 shapes measured in 20.5 s, 12 go another way than the default"
    ]


@pytest.mark.parametrize(
    ("typical", "said"),
    [
        (1.139, ", typical error 1.14 times that of the unfused model in bfloat16 (1.75 allowed)"),
        (None, ", that of the unfused model in bfloat16 2.53e+00"),
    ],
)
def test_the_proof_is_told_beside_the_unfused_model(typical: float | None, said: str) -> None:
    proof = SimpleNamespace(
        max_error=3.06, budget=11.2, unfused_error=2.53, typical=typical, typical_budget=1.75
    )
    manifest = cast("Any", SimpleNamespace(proof=proof, facts=SimpleNamespace(dtype="bfloat16")))
    assert proof_line(manifest) == f"proof against float64: largest error 3.06e+00 (1.12e+01 allowed){said}"
