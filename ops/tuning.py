"""Which way of computing a skinny linear layer is fastest on a GPU, as measured: a table by shape.

The table of a GPU lies in `ops/tuned/<gpu>.json` and is written by `benchmarks/gpu_linears.py --tune`. A
compile takes it into the artifact, so that a server launches exactly what was compiled. A shape that nobody
has measured gets the default that is written in the op's file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ostinato.errors import ArtifactError

FOLDER = Path(__file__).parent / "tuned"
FILE = "tuning.json"
OPS = ("skinny_linear", "skinny_gated")  # those with choices
CLASSES = (
    1,
    4,
    8,
    16,
    32,
    64,
    128,
    192,
    256,
)  # numbers of tokens that are measured; one between is served by the next


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
    shape = Shape(op, most, out, width, str(dtype).removeprefix("torch."))
    if choices is None:
        choices = _table(torch.cuda.get_device_name()) if torch.cuda.is_available() else {}
    return choices.get(shape)


def gpu_slug(name: str) -> str:
    """A GPU's name as a file is called: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write(folder: Path) -> None:
    """Put the table of this GPU into an artifact."""
    path = FOLDER / f"{gpu_slug(torch.cuda.get_device_name())}.json"
    text = path.read_text() if path.is_file() else '{"choices": []}'
    (folder / FILE).write_text(text)


def read(folder: Path) -> Choices:
    """The choices of an artifact. ArtifactError: they cannot be read."""
    try:
        return _choices(json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / FILE}: {error!r}; compile the model again") from None


@cache
def _table(gpu: str) -> Choices:
    path = FOLDER / f"{gpu_slug(gpu)}.json"
    return _choices(json.loads(path.read_text())) if path.is_file() else {}


def _choices(raw: dict[str, Any]) -> dict[Shape, Choice]:
    found: dict[Shape, Choice] = {}
    for row in raw["choices"]:
        shape = Shape(row["op"], row["tokens"], row["out"], row["width"], row["dtype"])
        is_faster = row["us"] <= row["parts_us"]
        found[shape] = Choice(row.get("config"), row.get("tile")) if is_faster else BY_PARTS
    return found
