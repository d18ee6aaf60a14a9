"""The folder that a compile writes: one compiler at a time, and whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ostinato.errors import ArtifactError, CompileError
from ostinato.runtime.artifact import Manifest, read_manifest, verify_files
from ostinato.runtime.artifact_names import MANIFEST

log = logging.getLogger(__name__)


def make_parent(out: Path) -> None:
    """Make the folder that `out` will be in. CompileError: it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(out.parent, os.W_OK)
    except OSError as error:
        raise CompileError(f"{out}: {error}; choose another folder for -o") from None
    if not writable:
        raise CompileError(f"{out.parent}: no right to write there; choose another folder for -o")


@contextlib.contextmanager
def only_compiler_of(out: Path) -> Iterator[None]:
    """Let one process at a time compile into `out`. The lock ends with its process at the latest."""
    path = out.parent / f".{out.name}.lock"
    while True:
        try:
            lock = open(path, "w")  # noqa: SIM115  # held across the yield below
        except OSError as error:
            raise CompileError(f"{path}: {error.strerror}; choose another folder for -o") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process compiles %s; waiting for it", out)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            break
        lock.close()  # the one before us removed the file that we waited on
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def same_artifact(out: Path, key: str) -> Manifest | None:
    """The manifest of a sound artifact of this key that is there already. A warning says what is damaged."""
    if not (out / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(out)
        if manifest.key != key:
            return None
        verify_files(out, manifest)  # the content too: nobody else can tell, and whoever loads it only fails
    except ArtifactError as error:
        log.warning("%s; replacing it", error)
        return None
    return manifest


def replace_folder(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; an old artifact is moved aside first and removed last."""
    old = out.parent / f".{out.name}.{os.getpid()}.old.partial"
    if out.exists():
        os.rename(out, old)
    os.rename(folder, out)
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)
