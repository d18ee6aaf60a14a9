"""What loading can do before torch is imported, which takes seconds: hashes, and a context of the GPU."""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from pathlib import Path
from typing import Any

from ostinato.runtime.artifact_names import MANIFEST, WEIGHTS
from ostinato.runtime.file_hash import FileHashes

log = logging.getLogger(__name__)


def load_ahead(folder: Path) -> FileHashes:
    """Begin on threads of their own, and return the hashes of the artifact's files.

    Of an artifact for a GPU the weights are left out, which are hashed on their way to it. A folder that is
    no artifact has no files here; whoever loads it says what is wrong with it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return FileHashes(())
    left_out = None
    if _is_for_gpu(path):
        left_out = folder / WEIGHTS
        threading.Thread(target=_make_context, name="ostinato-context", daemon=True).start()
    return FileHashes(found for found in folder.rglob("*") if found.is_file() and found != left_out)


def _is_for_gpu(manifest: Path) -> bool:
    try:
        return bool(json.loads(manifest.read_bytes())["target"]["device"] == "cuda")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _make_context() -> None:
    """The context that torch will use: the primary one of the first GPU that this process sees.

    Held for the life of the process, as torch holds it. A failure is torch's to report.
    """
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        error = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), 0)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )
    except (OSError, AttributeError) as wrong:
        error = wrong
    if error:
        log.debug("no context of the GPU ahead of torch: %s", error)
