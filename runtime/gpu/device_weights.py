"""Packed weights in GPU memory: read, verified and copied in one pass, in parallel.

Pieces of the file go through pinned buffers: threads read and hash, a stream of its own copies. The whole
file is one allocation on the device, at addresses that stay when the memory is given back and filled again,
so captured graphs live through `release` and `fill`.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ostinato.errors import ArtifactError, ModelError
from ostinato.graph.checkpoint import read_header
from ostinato.runtime.file_hash import PIECE_BYTES
from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.vmm import VmmDriver
from ostinato.runtime.weight_pack import PAD

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

    def tensors(self) -> dict[str, Tensor]:
        """All packed tensors by name: views that stay valid for the life of this object."""
        out: dict[str, Tensor] = {}
        for name, place in self._places.items():
            size = math.prod(place.shape) * place.dtype.itemsize
            flat = self._whole[place.start : place.start + size]
            out[name] = flat.view(place.dtype).view(place.shape)
        return out

    def fill(self, progress: Callable[[float], None] | None = None) -> str:
        """Copy the file to the device; return its digest, as `hash_file` gives it.

        Raises ArtifactError when the file has become shorter. Cost: one read of the file; 16 GB of page cache
        take about a second on 16 cores.
        """
        pieces = range(0, self.bytes, PIECE_BYTES)
        on_gpu = self._whole.is_cuda
        stream = torch.cuda.Stream(self._whole.device) if on_gpu else None
        local = threading.local()
        threads = max(1, min(THREADS, os.cpu_count() or 1, len(pieces)))
        done = 0
        with self.path.open("rb") as file:
            descriptor = file.fileno()

            def move(at: int) -> bytes:
                if not hasattr(local, "buffer"):
                    local.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
                    local.copied = torch.cuda.Event() if on_gpu else None
                elif local.copied is not None:
                    local.copied.synchronize()  # the buffer's last piece has left it
                size = min(PIECE_BYTES, self.bytes - at)
                piece = local.buffer[:size]
                window = memoryview(piece.numpy())
                got = 0
                while got < size:
                    read = os.preadv(descriptor, [window[got:]], at + got)
                    if not read:
                        raise ArtifactError(
                            f"{self.path}: it ends at byte {at + got}; compile the model again"
                        )
                    got += read
                if stream is None:
                    self._whole[at : at + size].copy_(piece)
                else:
                    with torch.cuda.stream(stream):
                        self._whole[at : at + size].copy_(piece, non_blocking=True)
                        local.copied.record(stream)
                return hashlib.sha256(window).digest()

            with ThreadPoolExecutor(threads, thread_name_prefix="ostinato-weights") as pool:
                digests = []
                for digest in pool.map(move, pieces):
                    digests.append(digest)
                    done += 1
                    if progress is not None:
                        progress(done / len(pieces))
        if stream is not None:
            stream.synchronize()
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def release(self) -> None:
        """Give the memory back; addresses and tensors stay, and must not be touched until `recommit`."""
        self._buffer.release_physical()

    def recommit(self) -> None:
        """Memory again, with zeros; `fill` or a copy must follow. Raises VmmError: there is none."""
        self._buffer.recommit()

    def close(self) -> None:
        """Let go of the memory; it goes with the last tensor."""
        del self._whole
        self._buffer.close()
