"""Packed weights in GPU memory: read, verified and copied in one pass, in parallel.

Pieces of the file go through pinned buffers: threads read and hash, a stream of its own copies. The whole
file is one allocation on the device, at addresses that stay when the memory is given back and filled again,
so captured graphs live through `sleep` and `wake`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ostinato.errors import ArtifactError, ModelError
from ostinato.graph.checkpoint import read_header
from ostinato.runtime.file_hash import PIECE_BYTES
from ostinato.runtime.gpu.host_copy import HostCopy
from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.vmm import VmmDriver, VmmError
from ostinato.runtime.weight_pack import PAD

log = logging.getLogger(__name__)

THREADS = 16  # at most: SHA-256 runs at 1.5 to 2 GB/s per core, a PCIe 5 link takes 50


class DeviceWeights:
    """The tensors of a packed file on one device. Owns their memory."""

    def __init__(self, path: Path, driver: VmmDriver, *, extent_bytes: int = 1 << 30) -> None:
        """Reserve and commit memory; nothing is read but the header. Raises ArtifactError, VmmError."""
        try:
            self._places = {
                name: place for name, place in read_header(path).items() if not name.startswith(PAD)
            }
        except ModelError as error:
            raise ArtifactError(f"{error}; or compile the model again") from error
        self.path, self.bytes, self.device = path, path.stat().st_size, driver.device
        granule = driver.granularity
        self._buffer = ElasticBuffer(
            driver, 1, -(-self.bytes // granule) * granule, extent_bytes=max(granule, extent_bytes)
        )
        self._buffer.grow(self.bytes)
        self._whole = self._buffer.segment(0)[: self.bytes]
        self._digest = ""  # of what was loaded first
        self._level = 0  # of sleep; 0: awake
        self._copy: HostCopy | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the device that are really held."""
        return self._buffer.physical_bytes

    def tensors(self) -> dict[str, Tensor]:
        """All packed tensors by name: views that stay valid for the life of this object."""
        out: dict[str, Tensor] = {}
        for name, place in self._places.items():
            size = math.prod(place.shape) * place.dtype.itemsize
            flat = self._whole[place.start : place.start + size]
            out[name] = flat.view(place.dtype).view(place.shape)
        return out

    def fill(self) -> str:
        """Copy the file, or its copy in host memory, to the device; return its digest, as of `hash_file`.

        Raises ArtifactError when the file is gone or has become shorter. Cost: one read of the file; 16 GB of
        page cache take about a second on 16 cores.
        """
        pieces = range(0, self.bytes, PIECE_BYTES)
        on_gpu = self._whole.is_cuda
        stream = torch.cuda.Stream(self._whole.device) if on_gpu else None
        local = threading.local()
        threads = max(1, min(THREADS, os.cpu_count() or 1, len(pieces)))
        with self._opened() as file:

            def move(at: int) -> bytes:
                size = min(PIECE_BYTES, self.bytes - at)
                if self._copy is not None:
                    piece = self._copy.bytes[at : at + size]
                else:
                    if not hasattr(local, "buffer"):
                        local.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
                        local.copied = torch.cuda.Event() if on_gpu else None
                    elif local.copied is not None:
                        local.copied.synchronize()  # the buffer's last piece has left it
                    piece = local.buffer[:size]
                    self._read(file, at, _bytes_of(piece))
                if stream is None:
                    self._whole[at : at + size].copy_(piece)
                else:
                    with torch.cuda.stream(stream):
                        self._whole[at : at + size].copy_(piece, non_blocking=True)
                        if self._copy is None:
                            local.copied.record(stream)
                return hashlib.sha256(_bytes_of(piece)).digest()

            with ThreadPoolExecutor(threads, thread_name_prefix="ostinato-weights") as pool:
                digests = list(pool.map(move, pieces))
        if stream is not None:
            stream.synchronize()
        whole = hashlib.sha256(b"".join(digests)).hexdigest()
        self._digest = self._digest or whole
        return whole

    def sleep(self, level: int) -> None:
        """Give the memory back; addresses and tensors stay, and must not be touched until `wake`.

        Level 1 copies to host memory first. Raises EngineError (no room for the copy), VmmError (the driver
        will not take memory away): all is as before.
        """
        if self._level == 0:
            if level == 1:
                self._copy = HostCopy(self._whole)
            try:
                self._release()
            except VmmError:
                self._drop_copy()
                raise
        elif level == 2:
            self._drop_copy()
        self._level = level

    def wake(self) -> None:
        """Memory and content again, from the copy or the file, and verified.

        Raises VmmError (no memory), ArtifactError (the file has changed): they sleep on.
        """
        if self._level == 0:
            return
        if self._buffer.is_released:  # else an earlier failure could not give it back
            self._buffer.recommit()
        try:
            if self.fill() != self._digest:
                what = "their copy in host memory" if self._copy is not None else self.path
                raise ArtifactError(
                    f"{what}: not the weights that the engine started with; start it anew, with the artifact "
                    "that it is to serve"
                )
        except BaseException:
            try:
                self._release()
            except VmmError as error:
                log.warning("the memory of the weights could not be given back again: %s", error)
            raise
        self._drop_copy()
        self._level = 0

    def _release(self) -> None:
        """Raises VmmError if nothing could be given back; a part that the driver keeps is logged."""
        try:
            self._buffer.release_physical()
        except VmmError as error:
            if not self._buffer.is_released:
                raise
            log.warning("some memory of the weights is not free yet: %s", error)
        if self._whole.is_cuda:
            torch.cuda.empty_cache()

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.free()
            self._copy = None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Descriptor of the file; -1 where the copy is read."""
        if self._copy is not None:
            yield -1
            return
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise ArtifactError(
                f"{self.path}: {error.strerror}; put it back, or compile the model"
            ) from error
        with file:
            yield file.fileno()

    def _read(self, descriptor: int, at: int, window: memoryview) -> None:
        """Fill `window` from the file's byte `at` on. Raises ArtifactError where it ends early."""
        got = 0
        while got < len(window):
            read = os.preadv(descriptor, [window[got:]], at + got)
            if not read:
                raise ArtifactError(f"{self.path}: it ends at byte {at + got}; compile the model again")
            got += read

    def close(self) -> None:
        """Let go of the memory; it goes with the last tensor."""
        self._drop_copy()
        del self._whole
        self._buffer.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
