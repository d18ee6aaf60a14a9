"""Packed weights: executes a weight program into one safetensors file, and maps that file back.

Every tensor starts at a multiple of 64 bytes of the file, so that kernels may use aligned loads. The format
allows no gaps, so a gap is a small uint8 tensor of its own, named `__pad__.N`; loading leaves those out.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import ArtifactError, CompileError, ModelError
from ostinato.graph.checkpoint import DTYPES, TensorPlace, read_header
from ostinato.ops.weight_expr import CONSTANT, Expr, evaluate, sources
from ostinato.runtime.file_hash import hash_file

ALIGN = 64
PAD = "__pad__."
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[float], None]  # share of the tensors that is written, 0 to 1


class PackedFile(NamedTuple):
    """What was written: size of the file, and its digest as `hash_file` gives it."""

    bytes: int
    digest: str


def pack(
    exprs: Mapping[str, Expr],
    read: Callable[[str], Tensor],
    out: Path,
    *,
    progress: Progress | None = None,
) -> PackedFile:
    """Evaluate each expression and stream it into `out`; peak memory is about one checkpoint tensor.

    The file appears under its name only when it is complete and on the disk. Raises CompileError when the
    disk is full, ModelError for NaN and infinite values; nothing is left behind then.
    """
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            _write_all(file, exprs, read, progress)
            file.flush()
            os.fsync(file.fileno())
        packed = PackedFile(temporary.stat().st_size, hash_file(temporary))
        os.replace(temporary, out)
        _sync_folder(out.parent)
        return packed
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(out.parent).free
        raise CompileError(
            f"{out}: the disk is full ({free / 2**20:.0f} MiB free) while packing the weights; "
            "make room or choose another output folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(
    file: IO[bytes],
    exprs: Mapping[str, Expr],
    read: Callable[[str], Tensor],
    progress: Progress | None,
) -> None:
    """Data first, behind room for the header; the header last, when all shapes are known."""
    room = 64 + sum(2 * len(json.dumps(name)) + 400 for name in exprs)
    base = -(-(8 + room) // ALIGN) * ALIGN
    header: dict[str, dict[str, object]] = {}
    file.seek(base)
    at = 0
    for done, (name, expr) in enumerate(exprs.items(), 1):
        if gap := -at % ALIGN:
            header[f"{PAD}{done}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            file.write(bytes(gap))
            at += gap
        shape, found = _write(file, name, expr, read)
        end = at + math.prod(shape) * found.itemsize
        header[name] = {"dtype": _NAMES[found], "shape": list(shape), "data_offsets": [at, end]}
        at = end
        if progress is not None:
            progress(done / len(exprs))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(base - 8)
    file.seek(0)
    file.write((base - 8).to_bytes(8, "little") + text)


def _write(
    file: IO[bytes], name: str, expr: Expr, read: Callable[[str], Tensor]
) -> tuple[tuple[int, ...], torch.dtype]:
    """Write one expression. Parts joined along the first dimension are written one by one, never joined."""
    if expr[0] in ("concat", "stack") and expr[1] == 0:
        specs = [_write(file, name, part, read) for part in expr[2]]
        shapes = [shape for shape, _ in specs]
        inner = [shape if expr[0] == "stack" else shape[1:] for shape in shapes]
        if any(part != inner[0] for part in inner) or any(found != specs[0][1] for _, found in specs):
            raise CompileError(f"parts of a weight do not fit together: {specs}")
        first = len(specs) if expr[0] == "stack" else sum(shape[0] for shape in shapes)
        return (first, *inner[0]), specs[0][1]
    made = evaluate(expr, read)
    if made.numel():
        is_weight = made.is_floating_point() and not name.startswith(CONSTANT)  # a mask may hold -inf
        if is_weight and not _is_finite(made):
            dtype = str(made.dtype).removeprefix("torch.")
            raise ModelError(
                f"weight {name}, made of {', '.join(sources(expr))}: NaN or infinite values in {dtype}; "
                "the checkpoint is damaged or does not fit that type: copy it anew or choose another dtype"
            )
        file.write(made.contiguous().view(-1).view(torch.uint8).numpy().data)
    return tuple(made.shape), made.dtype


def _is_finite(values: Tensor) -> bool:
    # aminmax passes NaN on, makes no temporary, and is 40 times as fast as isfinite (2-core CPU machine)
    low, high = torch.aminmax(values if values.itemsize > 1 else values.float())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def load_packed(path: Path) -> dict[str, Tensor]:
    """All packed tensors by name: see `map_packed`."""
    return map_packed(path).tensors


class MappedPack(NamedTuple):
    """A packed file in memory."""

    memory: mmap.mmap
    tensors: dict[str, Tensor]


def map_packed(path: Path) -> MappedPack:
    """All packed tensors by name: views of a read-only mapping of the file.

    Nothing is read until it is used; writing to one crashes. Once in the page cache, a mapping is as fast as
    a copy in huge pages, and loads in 3 ms instead of 65 (docs/log.md).
    Raises ArtifactError when the file is missing, or its size does not fit its header.
    """
    try:
        places = read_header(path)
    except ModelError as error:
        raise ArtifactError(f"{error}; or compile the model again") from error
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    views = {name: _view(memory, place) for name, place in places.items() if not name.startswith(PAD)}
    return MappedPack(memory, views)


def _view(memory: mmap.mmap, place: TensorPlace) -> Tensor:
    if place.start == place.stop:
        return torch.empty(place.shape, dtype=place.dtype)
    with warnings.catch_warnings():  # torch warns that it cannot forbid writes to read-only memory
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.frombuffer(memory, dtype=place.dtype, count=math.prod(place.shape), offset=place.start)
    return flat.reshape(place.shape)
