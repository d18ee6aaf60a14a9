"""Content hash of files, in parallel: SHA-256 over the SHA-256 digests of a file's 16 MiB pieces."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

PIECE_BYTES = 16 * 2**20


def hash_file(path: Path) -> str:
    """Hex digest of the file's content."""
    with FileHashes([path]) as digest:
        return digest(path)


class FileHashes:
    """Hashes files on threads of its own from the moment it is made: `hashes(path)` waits for the digest.

    hashlib releases the GIL, so the caller can import modules meanwhile. Leaving the context drops what
    nobody asked for.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="hash")
        self._pieces = {
            path: [
                self._threads.submit(_digest, path, at) for at in range(0, path.stat().st_size, PIECE_BYTES)
            ]
            for path in paths
        }

    def __call__(self, path: Path) -> str:
        """Hex digest of the file's content; one that was not given at the start is hashed now."""
        pieces = self._pieces.get(path)
        if pieces is None:
            return hash_file(path)
        return hashlib.sha256(b"".join(piece.result() for piece in pieces)).hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._threads.shutdown(cancel_futures=True)


def _digest(path: Path, offset: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.sha256(os.pread(file.fileno(), PIECE_BYTES, offset)).digest()
