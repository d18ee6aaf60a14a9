"""Which way of computing a skinny linear layer is fastest on a GPU, as measured: a table by shape.

The table of a GPU lies in `ops/tuned/<gpu>.json` and is written by `benchmarks/gpu_linears.py --tune`. A
compile takes it into the artifact and adds what it measures itself (`runtime/gpu/layer_tuning.py`), so that a
server launches exactly what was compiled. A shape that nobody has measured gets the default that is written
in the op's file.
A row of a table is a shape, the way that it takes ("config", "tile", or neither: by parts), and for readers
what the ways took, in us.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ostinato.errors import ArtifactError
from ostinato.ops.skinny_rows import Config, check_config
from ostinato.ops.wgmma_linear import Tile, check_tile

FOLDER = Path(__file__).parent / "tuned"
FILE = "tuning.json"
OPS = ("skinny_linear", "skinny_gated")  # those with choices
# Numbers of tokens that are measured; one between is served by the next.
CLASSES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)


class Shape(NamedTuple):
    """A skinny layer: the op, the most tokens, outputs, width, number type."""

    op: str
    tokens: int
    out: int
    width: int
    dtype: str


class Choice(NamedTuple):
    """What was fastest: a Triton kernel's configuration, a CUDA kernel's tile, or neither: the parts."""

    config: dict[str, Any] | None = None
    tile: dict[str, Any] | None = None


BY_PARTS = Choice()
Choices = Mapping[Shape, Choice]


def choice(
    op: str, tokens: int, out: int, width: int, dtype: torch.dtype, choices: Choices | None = None
) -> Choice | None:
    """The measured choice of a layer; None: nobody has measured it. `choices`: instead of the GPU's table."""
    most = next((c for c in CLASSES if c >= tokens), None)
    if most is None:
        return None
    if choices is None:
        choices = _table(torch.cuda.get_device_name()) if torch.cuda.is_available() else {}
    return choices.get(Shape(op, most, out, width, dtype_name(dtype)))


def dtype_name(dtype: torch.dtype) -> str:
    """A number type as tables have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def gpu_slug(name: str) -> str:
    """A GPU's name as a file is called: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table_path() -> Path:
    """Where the table of this GPU lies, if it has one."""
    return FOLDER / f"{gpu_slug(torch.cuda.get_device_name())}.json"


def write(folder: Path) -> None:
    """Put the table of this GPU into an artifact."""
    path = table_path()
    text = path.read_text() if path.is_file() else '{"choices": []}'
    (folder / FILE).write_text(text)


def row(shape: Shape, way: Choice, **us: float) -> dict[str, Any]:
    """A row of a table. `us`: times, as "us" (of this way), "default_us" and "parts_us"."""
    chosen = {kind: value for kind, value in way._asdict().items() if value is not None}
    return shape._asdict() | chosen | {name: round(value, 3) for name, value in us.items()}


def add(path: Path, rows: Sequence[dict[str, Any]], **about: Any) -> None:
    """Put rows into a table's file, in the place of those of the same shapes. `about`: what else it says."""
    raw = json.loads(path.read_text()) if path.is_file() else {}
    found = {_shape(row): row for row in [*raw.pop("choices", []), *rows]}
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in (raw | about).items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in found.values())
    path.write_text("{\n" + ",\n".join([*head, f'"choices": [\n{lines}\n]']) + "\n}\n")
    _table.cache_clear()


def measured(folder: Path) -> dict[str, Any]:
    """What the compile of an artifact says of its measurements; empty: it made none."""
    path = folder / FILE
    return dict(json.loads(path.read_text()).get("measured", {})) if path.is_file() else {}


def read(folder: Path) -> Choices:
    """The choices of an artifact. ArtifactError: they cannot be read, or one of them cannot be launched."""
    try:
        return _choices(json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{folder / FILE}: {error!r}; compile the model again") from None


@cache
def _table(gpu: str) -> Choices:
    path = FOLDER / f"{gpu_slug(gpu)}.json"
    return _choices(json.loads(path.read_text())) if path.is_file() else {}


def _choices(raw: dict[str, Any]) -> dict[Shape, Choice]:
    return {_shape(row): _way(row) for row in raw["choices"]}


def _way(row: Mapping[str, Any]) -> Choice:
    """Raises ValueError or TypeError for what the op cannot launch: a step would be too late for that."""
    op, tokens, found = row["op"], row["tokens"], Choice(row.get("config"), row.get("tile"))
    if op not in OPS or tokens not in CLASSES:
        raise ValueError(f"a row for {op} and {tokens} tokens; there are {', '.join(OPS)} and {CLASSES}")
    for values in (found.config, found.tile):
        if values is not None and not all(isinstance(value, int) for value in values.values()):
            raise TypeError(f"{values} for {op}: whole numbers are allowed")
    if found.config is not None:
        config = Config(**found.config)
        for size in (config.rows, config.block_k, config.num_warps):
            if size < 1 or size & (size - 1):
                raise ValueError(f"{config} for {op}: rows, block_k and num_warps are powers of two")
        if config.num_warps > 32:
            raise ValueError(f"{config} for {op}: a block has at most 32 warps")
        if min(config.split, config.num_stages) < 1 or config.prefetch < 0:
            raise ValueError(f"{config} for {op}: split and num_stages are 1 or more, prefetch 0 or more")
        check_config(op, config, getattr(torch, row["dtype"]), tokens)
    if found.tile is not None:
        check_tile(op, Tile(**found.tile), op == "skinny_gated")
    return found


def _shape(row: Mapping[str, Any]) -> Shape:
    return Shape(row["op"], row["tokens"], row["out"], row["width"], row["dtype"])
