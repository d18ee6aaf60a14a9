"""Weights while an engine sleeps: who holds their memory, and how it comes back.

Level 1 keeps a copy where it is quick to fetch, level 2 keeps nothing and reads the artifact again. Waking
verifies: what is there afterwards has the digest of what was loaded at start.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ostinato.errors import ArtifactError
from ostinato.runtime.file_hash import PIECE_BYTES


class Weights(Protocol):
    """The weights of one model. `sleep` and `wake` are all or nothing, and nothing computes meanwhile."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of the device's memory (on a CPU: of mapped pages) that they take now."""
        ...

    def sleep(self, level: int) -> None:
        """Give the memory back; asleep at level 1, level 2 drops the copy too. Raises EngineError."""
        ...

    def wake(self) -> None:
        """Have the weights again, at the same addresses. Raises EngineError, and they sleep on."""
        ...


class FixedWeights:
    """Weights that stay where they are: of models that own no memory that could be given back."""

    resident_bytes = 0

    def sleep(self, level: int) -> None:
        """Nothing to give back."""

    def wake(self) -> None:
        """Nothing to fetch."""


class MappedWeights:
    """Weights that a CPU reads out of a mapped file. Level 1 is a no-op: the page cache is the host's memory.

    Level 2 drops the pages from this process; they are the kernel's to keep or to forget.
    """

    def __init__(self, memory: mmap.mmap, name: str, digest: str) -> None:
        """`digest`: of the file, as `hash_file` gives it. `name` is for messages."""
        self._memory, self._name, self._digest = memory, name, digest
        self._dropped = False

    @property
    def resident_bytes(self) -> int:
        """The size of the mapping; 0 after level 2."""
        return 0 if self._dropped else len(self._memory)

    def sleep(self, level: int) -> None:
        """Drop the pages at level 2."""
        if level == 2:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._dropped = True

    def wake(self) -> None:
        """After level 2 read all and compare. Raises ArtifactError for a file that has changed."""
        if not self._dropped:
            return
        if self._memory.size() != len(self._memory) or self._hash() != self._digest:
            raise ArtifactError(
                f"{self._name}: the file has changed while the engine slept; put it back, or start the "
                "engine anew"
            )
        self._dropped = False

    def _hash(self) -> str:
        with memoryview(self._memory) as whole, ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            pieces = range(0, len(whole), PIECE_BYTES)
            digests = threads.map(lambda at: hashlib.sha256(whole[at : at + PIECE_BYTES]).digest(), pieces)
            return hashlib.sha256(b"".join(digests)).hexdigest()
