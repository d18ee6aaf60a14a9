"""What `compile-model` says at its end."""

from pathlib import Path

from ostinato.ops import tuning
from ostinato.tools.compile_model import measured_layers


def test_measured_layers_are_told_where_a_compile_has_measured_some(tmp_path: Path) -> None:
    assert measured_layers(tmp_path) == []  # of a CPU
    tuning.add(tmp_path / tuning.FILE, [])
    assert measured_layers(tmp_path) == []  # all in the GPU's table
    tuning.add(tmp_path / tuning.FILE, [], measured={"shapes": 45, "not_default": 12, "seconds": 20.5})
    assert measured_layers(tmp_path) == [
        "linear layers: 45 shapes measured in 20.5 s, 12 go another way than the default"
    ]
