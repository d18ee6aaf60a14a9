"""Bytes of a GPU kept in host memory that it can copy from at full speed, and that is freed when told."""

from __future__ import annotations

import contextlib
import logging
import mmap

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.runtime.memory.memory_limits import MemoryLimits

log = logging.getLogger(__name__)

_LEFT_BYTES = 1 << 30  # host memory that always stays with others


class HostCopy:
    """A copy of a flat uint8 tensor. Not torch's pinned memory, which rounds up and is never given back."""

    def __init__(self, source: Tensor) -> None:
        """Copy. Raises EngineError when the host has not enough memory; nothing is kept then."""
        size = source.numel()
        free = MemoryLimits(_LEFT_BYTES).available()
        if free < size:
            raise EngineError(
                f"a copy of the weights needs {size >> 20} MiB of host memory, {free >> 20} MiB may be taken "
                f"({_LEFT_BYTES >> 20} MiB stay free); free memory, or sleep at level 2, which keeps no copy"
            )
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise EngineError(
                f"{size >> 20} MiB of host memory: {error.strerror}; sleep at level 2, which keeps no copy"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # pinning and copying go page by page
        self.bytes: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = source.is_cuda and self._pin()
        try:
            self.bytes.copy_(source)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Give the memory back. Nothing may read `bytes` any more."""
        if self._pinned:
            _cudart("cudaHostUnregister", self.bytes.data_ptr())
            self._pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # somebody holds a view: the memory goes with it
            self._memory.close()

    def _pin(self) -> bool:
        error = _cudart("cudaHostRegister", self.bytes.data_ptr(), self.bytes.numel(), 0)
        if error:
            log.warning("host memory is not pinned, so waking takes longer: CUDA error %d", error)
        return not error


def _cudart(call: str, *arguments: int) -> int:
    """Call the CUDA runtime; its error code."""
    return int(getattr(torch.cuda.cudart(), call)(*arguments))
