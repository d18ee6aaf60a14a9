"""Compiled kernels of this process: found by key, kept as machine code, in memory and in an artifact.

A variant is a kernel with the types of its arguments, its constants and its options. `compile-model` runs
every plan while the store records what is launched, has what is missing compiled, and writes the cubins
into the artifact. A server reads them into a sealed store: it imports neither triton nor NVRTC, and a variant
that is not there is an error that names it.  The key of a variant holds the GPU's architecture and a hash of
the kernel's source files, so cubins of another version of an op are not found, rather than launched with the
wrong arguments.

Several engines, also of several GPUs, and a compile may share a process: a recording is of one thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from ostinato.errors import ArtifactError, EngineError
from ostinato.section import Section

INDEX, CUBINS = "kernels.json", "kernels.cubins"


class Binary(Section):
    """One compiled variant: what a launch must know, and where its cubin lies in the file of all."""

    key: str
    symbol: str
    threads: int
    shared: int
    params: tuple[str, ...]  # "ptr", "i32", "i64", "fp32" or "map", in the order of the launch
    launch_pdl: bool
    offset: int
    size: int


class _Index(Section):
    version: int = 1
    capability: int
    binaries: tuple[Binary, ...]


class _Compiled(NamedTuple):
    binary: Binary
    cubin: bytes


class Variant(NamedTuple):
    """What decides a compiled kernel, for whoever compiles it: `triton_kernels` or `cuda_kernels`."""

    key: str
    module: str  # where the kernel is written, and its name there
    function: str
    names: tuple[str, ...]  # of a Triton kernel's parameters; of a CUDA source's constants
    kinds: tuple[tuple[str, Any], ...]  # of each: ("const", value), or (type, whether divisible by 16)
    options: tuple[Any, ...]  # Triton: as `triton_kernels.OPTIONS`; CUDA: threads, bytes of shared memory


class Recording:
    """The variants that one thread launches meanwhile; `is_dry`: it launches nothing."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.variants: dict[str, Variant] = {}  # by key
        self._thread = threading.get_ident()

    def is_mine(self) -> bool:
        """Whether the calling thread is recorded."""
        return threading.get_ident() == self._thread


class KernelStore:
    """Variants of this process. It is filled before a server starts."""

    def __init__(self) -> None:
        self.is_sealed = False  # nothing is compiled, except in a recording
        self.launches = 0  # since start, for tests and logs
        self.recording_now: Recording | None = None
        self._compiled: dict[str, _Compiled] = {}
        self._one_recording = threading.Lock()
        self._step = threading.local()  # .carveout

    @property
    def carveout(self) -> int:
        """Percent of L1 that the calling thread's launches want as shared memory; 100 until it is set.

        All kernels of a step ask for the same: to change it a multiprocessor must run empty, so the next
        kernel could not begin before the last ends. It is no argument of an op, for a graph's ops know
        nothing of the step that they run in; and of a thread, for wgmma_linear's variants depend on it, and
        two engines of a process would launch what neither has compiled.
        """
        return getattr(self._step, "carveout", 100)

    @carveout.setter
    def carveout(self, percent: int) -> None:
        self._step.carveout = percent

    @contextmanager
    def recording(self, *, is_dry: bool = False) -> Iterator[Recording]:
        """Note what the calling thread launches. A second compile in this process waits for the first."""
        with self._one_recording:
            self.recording_now = made = Recording(is_dry=is_dry)
            try:
                yield made
            finally:
                self.recording_now = None

    def get(self, key: str, build: Callable[[], tuple[Binary, bytes]]) -> _Compiled:
        """The variant `key`, built if it is missing. Raises EngineError in a sealed store."""
        found = self._compiled.get(key)
        if found is None:
            recording = self.recording_now
            if self.is_sealed and not (recording is not None and recording.is_mine()):
                raise EngineError(
                    f"kernel variant {key} is not in the artifact; compile the model again with this version"
                )
            found = self._compiled[key] = _Compiled(*build())
        return found

    def missing(self, variants: Iterable[Variant]) -> list[Variant]:
        """Those that are not compiled yet."""
        return [variant for variant in variants if variant.key not in self._compiled]

    def add(self, binary: Binary, cubin: bytes) -> None:
        """Take what was compiled elsewhere."""
        self._compiled[binary.key] = _Compiled(binary, cubin)

    def write(self, folder: Path, keys: Iterable[str]) -> int:
        """Put variants into a folder; return their number."""
        binaries, at = [], 0
        with (folder / CUBINS).open("wb") as file:
            for key in sorted(keys):
                binary, cubin = self._compiled[key]
                binaries.append(binary.model_copy(update={"offset": at, "size": len(cubin)}))
                file.write(cubin)
                at += len(cubin)
        index = _Index(capability=capability_here(), binaries=tuple(binaries))
        (folder / INDEX).write_text(index.model_dump_json(indent=1))
        return len(binaries)

    def read(self, folder: Path) -> int:
        """Add the variants of a folder; return their number. ArtifactError: unreadable, or of another GPU."""
        try:
            index = _Index.model_validate(json.loads((folder / INDEX).read_bytes()))
            cubins = (folder / CUBINS).read_bytes()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            said = f"{where}: {first['msg']}"
            raise ArtifactError(f"{folder / INDEX}: {said}; compile the model again") from None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{folder / INDEX}: {error}; compile the model again") from None
        if index.capability != (here := capability_here()):
            raise ArtifactError(
                f"{folder}: kernels for compute capability {index.capability}, this GPU has {here}; "
                "compile the model on this machine"
            )
        for binary in index.binaries:
            cubin = cubins[binary.offset : binary.offset + binary.size]
            self._compiled[binary.key] = _Compiled(binary, cubin)
        return len(index.binaries)


STORE = KernelStore()


@cache
def capability(device: int) -> int:
    """Compute capability of a GPU, e.g. 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def capability_here() -> int:
    """That of the current GPU."""
    return capability(torch.cuda.current_device())
