"""Content hash of a file, in parallel: SHA-256 over the SHA-256 digests of its 16 MiB pieces."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 16 * 2**20


def hash_file(path: Path) -> str:
    """Hex digest of the file's content. hashlib releases the GIL, so pieces are hashed side by side."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        descriptor = file.fileno()

        def digest(offset: int) -> bytes:
            return hashlib.sha256(os.pread(descriptor, PIECE_BYTES, offset)).digest()

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            digests = pool.map(digest, range(0, size, PIECE_BYTES))
            return hashlib.sha256(b"".join(digests)).hexdigest()
