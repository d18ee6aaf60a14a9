"""Safetensors files of a model folder: found, verified to the byte, read without pickle.

Which files count (as in transformers): `model.safetensors` if there is one, else the shards that
`model.safetensors.index.json` names.
- Every shard of the index must exist, be whole, and hold each tensor that the index places there: else
ModelError.
- A tensor in two shards is an error, even with equal data: nobody can say which copy was meant.
- A tensor in a listed shard that the index does not name is usable; a warning names it.
- Any other .safetensors file in the folder is ignored; a warning names it.
- Pickled checkpoints (.bin, .pt, .pth, .ckpt) are never opened.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import LFS_POINTER, ModelError, is_pointer

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class TensorPlace(NamedTuple):
    """Where a tensor lies: absolute byte range in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Places of all tensors of one safetensors file; the file's size must fit its header to the byte."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix + file.peek(32)[: len(LFS_POINTER) - 8] == LFS_POINTER:
                raise ModelError(is_pointer(path))
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(
                    f"{path}: not a whole safetensors file ({size} bytes, header of {length} bytes); "
                    "download or convert it again"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); check the file and its rights"
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{path}: broken safetensors header ({error}); download or convert it again"
        ) from error
    places = dict(_places(path, header, 8 + length))
    end = max((place.stop for place in places.values()), default=8 + length)
    if end != size:
        state = f"{end - size} bytes are missing" if end > size else f"{size - end} bytes too many"
        raise ModelError(f"{path}: {size} bytes, but its header describes {end} ({state}); download it again")
    return places


def _places(path: Path, header: Any, base: int) -> Iterator[tuple[str, TensorPlace]]:
    """Entries of a parsed header, checked: known dtype, sizes that agree, no gaps and no overlap."""
    if not isinstance(header, dict):
        raise ModelError(f"{path}: broken safetensors header (not an object); download it again")
    found: list[tuple[str, TensorPlace]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype_name, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
            start, stop = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{path}: header entry of {name} is broken ({error!r}); download it again"
            ) from error
        if dtype_name not in DTYPES:
            raise ModelError(
                f"{path}: tensor {name} has number type {dtype_name}; known: {', '.join(DTYPES)}. "
                "Convert the checkpoint to bfloat16"
            )
        dtype = DTYPES[dtype_name]
        if stop - start != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise ModelError(
                f"{path}: tensor {name} of shape {list(shape)} has {stop - start} bytes; download it again"
            )
        found.append((name, TensorPlace(path, shape, dtype, base + start, base + stop)))
    end = base
    for name, place in sorted(found, key=lambda item: (item[1].start, item[1].stop)):
        if place.start != end:
            raise ModelError(f"{path}: gap or overlap before tensor {name} at byte {end}; download it again")
        end = place.stop
    yield from found


def read_tensors(places: dict[str, TensorPlace]) -> dict[str, Tensor]:
    """Copies of the tensors of a small file."""
    found = {}
    for name, place in places.items():
        with place.file.open("rb") as file:
            file.seek(place.start)
            raw = bytearray(file.read(place.stop - place.start))
        found[name] = torch.frombuffer(raw, dtype=place.dtype).reshape(place.shape)
    return found


class Checkpoint:
    """All tensors of a model folder by name. Opening verifies them; reading maps, so it takes no memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files, listed = _files(folder)
        self.places: dict[str, TensorPlace] = {}
        for file in self.files:
            for name, place in read_header(file).items():
                if name in self.places:
                    raise ModelError(
                        f"{folder}: tensor {name} is in {self.places[name].file.name} and in {file.name}; "
                        "remove the wrong shard and correct the index"
                    )
                self.places[name] = place
        for name, file_name in listed.items():
            if name not in self.places or self.places[name].file.name != file_name:
                raise ModelError(
                    f"{folder / INDEX}: places tensor {name} in {file_name}, which does not hold it; "
                    "download that shard and the index again"
                )
        if listed and (unlisted := [name for name in self.places if name not in listed]):
            log.warning(
                "%s does not list %d tensors of its shards (%s); they are used if the model wants them",
                folder / INDEX,
                len(unlisted),
                ", ".join(unlisted[:3]),
            )
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, name: str) -> Tensor:
        """The tensor, backed by a private mapping of the file: writing to it never reaches the disk."""
        place = self.places[name]
        if place.start == place.stop:
            return torch.empty(place.shape, dtype=place.dtype)
        if place.file not in self._maps:
            with place.file.open("rb") as file:
                self._maps[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = self._maps[place.file]
        count = math.prod(place.shape)
        if place.start % place.dtype.itemsize:  # an old writer may leave data unaligned; copy it
            raw = bytearray(mapped[place.start : place.stop])
            return torch.frombuffer(raw, dtype=place.dtype, count=count).reshape(place.shape)
        flat = torch.frombuffer(mapped, dtype=place.dtype, count=count, offset=place.start)
        return flat.reshape(place.shape)


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Files that count, and the index (tensor -> file name), empty without one."""
    present = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    index: dict[str, str] = {}
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
        if (folder / INDEX).is_file():
            log.warning("%s is ignored, because %s is there too", folder / INDEX, SINGLE)
    elif (folder / INDEX).is_file():
        index = _read_index(folder / INDEX)
        files = [folder / name for name in sorted(set(index.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ModelError(
                f"{folder}: missing {', '.join(missing)}, which {INDEX} lists; finish the download"
            )
    else:
        raise ModelError(_no_files(folder, present))
    if ignored := [path.name for path in present if path not in files]:
        log.warning("%s: not part of the model, ignored: %s", folder, ", ".join(ignored))
    return files, index


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text("utf-8"))["weight_map"]
        if not index or not all(isinstance(file, str) for file in index.values()):
            raise ValueError("weight_map is empty or holds something else than file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: broken index ({error!r}); download it again") from error
    for file in index.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path}: {file!r} is not the name of a .safetensors file in this folder; check the index"
            )
    return dict(index)


def _no_files(folder: Path, present: list[Path]) -> str:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if present:
        names = ", ".join(path.name for path in present[:3])
        return (
            f"{folder}: neither {SINGLE} nor {INDEX}, but {names}; download the index, "
            f"or rename a single whole file to {SINGLE}"
        )
    if pickled:
        return (
            f"{folder}: only pickled weights ({', '.join(pickled[:3])}), which can run code when opened; "
            "convert them where you trust them: "
            "AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir)"
        )
    return f"{folder}: no weights; needed: {SINGLE}, or shards with {INDEX}. Finish the download of the model"
