"""Which way of computing a skinny layer is taken, from a table of measurements."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.errors import ArtifactError
from ostinato.ops import skinny_gated, skinny_linear, tuning
from ostinato.ops.skinny_rows import Config, check_config
from ostinato.ops.skinny_ways import Way, choice_of
from ostinato.ops.wgmma_linear import Tile, check_tile

TILE = {"rows": 64, "groups": 1, "split": 2, "share": 1}
CONFIG = {"by_tensor_cores": False, "rows": 2, "block_k": 1024, "num_warps": 4, "num_stages": 1}
CONFIG |= {"split": 1, "prefetch": 0}


def shape(tokens: int) -> tuning.Shape:
    return tuning.Shape("skinny_linear", tokens, 64, 32, "bfloat16")


@pytest.fixture
def choices(tmp_path: Path) -> tuning.Choices:
    rows = [
        tuning.row(shape(1), tuning.Choice(config=CONFIG), us=2.0, parts_us=5.0),
        tuning.row(shape(8), tuning.BY_PARTS, us=5.0, parts_us=5.0),
        tuning.row(shape(32), tuning.Choice(tile=TILE), us=6.0, parts_us=5.99),  # within the noise
    ]
    tuning.add(tmp_path / tuning.FILE, rows)
    return tuning.read(tmp_path)


def test_a_row_gives_back_its_way_whatever_its_times(choices: tuning.Choices) -> None:
    bf16 = torch.bfloat16
    assert tuning.choice("skinny_linear", 1, 64, 32, bf16, choices) == tuning.Choice(CONFIG)
    assert tuning.choice("skinny_linear", 8, 64, 32, bf16, choices) == tuning.BY_PARTS
    assert tuning.choice("skinny_linear", 32, 64, 32, bf16, choices) == tuning.Choice(tile=TILE)


def test_added_rows_take_the_place_of_the_same_shapes_and_keep_the_rest(tmp_path: Path) -> None:
    path = tmp_path / tuning.FILE
    path.write_text(json.dumps({"header": {"gpu": "G"}, "choices": [tuning.row(shape(1), tuning.BY_PARTS)]}))
    assert tuning.measured(tmp_path) == {}
    rows = [tuning.row(shape(1), tuning.Choice(CONFIG)), tuning.row(shape(4), tuning.BY_PARTS, us=1.23456)]
    tuning.add(path, rows, measured={"shapes": 2})
    assert tuning.read(tmp_path) == {shape(1): tuning.Choice(CONFIG), shape(4): tuning.BY_PARTS}
    raw = json.loads(path.read_text())
    assert raw["header"] == {"gpu": "G"}
    assert raw["choices"][1]["us"] == 1.235
    assert tuning.measured(tmp_path) == {"shapes": 2}


def test_a_row_added_to_the_table_of_this_gpu_counts_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Table's GPU")
    assert tuning.choice(*shape(4)[:4], torch.bfloat16) is None
    tuning.add(tuning.table_path(), [tuning.row(shape(4), tuning.BY_PARTS)])
    assert tuning.choice(*shape(4)[:4], torch.bfloat16) == tuning.BY_PARTS


@pytest.mark.parametrize("way", [None, Config(**CONFIG), Tile(**TILE)])
def test_every_way_survives_a_table(way: Way, tmp_path: Path) -> None:
    tuning.add(tmp_path / tuning.FILE, [tuning.row(shape(1), choice_of(way))])
    found = tuning.read(tmp_path)[shape(1)]
    assert found == choice_of(way)
    assert (found.config and Config(**found.config)) == (way if isinstance(way, Config) else None)
    assert (found.tile and Tile(**found.tile)) == (way if isinstance(way, Tile) else None)


def test_tokens_between_two_classes_are_served_by_the_next(choices: tuning.Choices) -> None:
    assert tuning.choice("skinny_linear", 5, 64, 32, torch.bfloat16, choices) == tuning.BY_PARTS
    assert tuning.choice("skinny_linear", 3, 64, 32, torch.bfloat16, choices) is None  # nobody measured 4


@pytest.mark.parametrize(
    ("op", "tokens", "out", "width", "dtype"),
    [
        ("skinny_gated", 1, 64, 32, torch.bfloat16),
        ("skinny_linear", 1, 65, 32, torch.bfloat16),
        ("skinny_linear", 1, 64, 32, torch.float32),
        ("skinny_linear", 33, 64, 32, torch.bfloat16),
        ("skinny_linear", 257, 64, 32, torch.bfloat16),
    ],
)
def test_a_shape_that_nobody_measured_has_no_choice(
    choices: tuning.Choices, op: str, tokens: int, out: int, width: int, dtype: torch.dtype
) -> None:
    assert tuning.choice(op, tokens, out, width, dtype, choices) is None


@pytest.mark.parametrize("text", ["", "{}", '{"choices": [{"op": "skinny_linear"}]}', '{"choices": 3}'])
def test_a_broken_table_is_an_artifact_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / tuning.FILE).write_text(text)
    with pytest.raises(ArtifactError, match=r"tuning\.json: .*compile the model again"):
        tuning.read(tmp_path)
    with pytest.raises(ArtifactError, match=r"tuning\.json: .*compile the model again"):
        tuning.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"op": "linear"}, "a row for linear and 2 tokens"),
        ({"tokens": 3}, "a row for skinny_linear and 3 tokens"),
        ({"dtype": "bfloat17", "config": CONFIG}, "bfloat17"),
        ({"config": [1]}, "values"),
        ({"config": CONFIG | {"rows": "2"}}, "whole numbers"),
        ({"config": CONFIG | {"rows": 3}}, "powers of two"),
        ({"config": CONFIG | {"block_k": 0}}, "powers of two"),
        ({"config": CONFIG | {"num_warps": -4}}, "powers of two"),
        ({"config": CONFIG | {"num_warps": 64}}, "at most 32 warps"),
        ({"config": CONFIG | {"split": 0}}, "1 or more"),
        ({"config": CONFIG | {"num_stages": 0}}, "1 or more"),
        ({"config": CONFIG | {"prefetch": -1}}, "0 or more"),
        ({"tile": TILE | {"rows": 64.0}}, "whole numbers"),
        ({"config": CONFIG | {"pipes": 2}}, "pipes"),
        ({"config": {"rows": 2}}, "by_tensor_cores"),
        ({"config": CONFIG, "tokens": 32}, "for 32 tokens; it takes up to 16"),
        ({"tile": TILE | {"rows": 63}}, "cannot be launched: rows"),
        ({"op": "skinny_gated", "tile": TILE | {"rows": 24, "split": 1}}, "for a gated layer: rows"),
    ],
)
def test_a_way_that_no_launch_can_go_is_refused_when_the_table_is_read(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    row = tuning.row(shape(2), tuning.BY_PARTS) | {"config": CONFIG}
    tuning.add(tmp_path / tuning.FILE, [row])
    assert tuning.read(tmp_path) == {shape(2): tuning.Choice(CONFIG)}
    wrong = {"choices": [row | {"config": None} | changed]}
    (tmp_path / tuning.FILE).write_text(json.dumps(wrong))
    with pytest.raises(ArtifactError, match=rf"tuning\.json: .*{said}.*; compile the model again"):
        tuning.read(tmp_path)


@pytest.mark.parametrize("path", sorted(tuning.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_choice_of_a_shipped_table_is_a_configuration_that_its_op_takes(path: Path) -> None:
    for choice in json.loads(path.read_text())["choices"]:
        assert choice["op"] in tuning.OPS
        assert choice["tokens"] in tuning.CLASSES
        dtype = getattr(torch, choice["dtype"])
        if "tile" in choice:
            check_tile(choice["op"], Tile(**choice["tile"]), choice["op"] == "skinny_gated")
        elif "config" in choice:
            check_config(choice["op"], Config(**choice["config"]), dtype, choice["tokens"])
    assert {skinny_linear.__name__.rpartition(".")[2], skinny_gated.__name__.rpartition(".")[2]} == set(
        tuning.OPS
    )


def test_the_name_of_a_gpu_becomes_that_of_a_file() -> None:
    assert tuning.gpu_slug("NVIDIA H200") == "nvidia-h200"
    assert tuning.gpu_slug("NVIDIA GeForce RTX 4090 (D)") == "nvidia-geforce-rtx-4090-d"
