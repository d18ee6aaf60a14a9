"""Engines that share one GPU tell each other what they hold and lack. Files and file locks; no daemon.

Protocol, version 1. All engines of a user that share a device have one folder (`peers_folder`). Each has a
file `<pid>-<random>.engine` there and keeps it locked (flock, exclusive) as long as it lives: a file that can
be locked belongs to a dead engine, and whoever sees that removes it. It is made under another name, locked,
and renamed, so it is never seen unlocked. Content: one record of RECORD_BYTES, JSON padded with spaces,
written by one pwrite:

    {"version": 1, "held": bytes of KV memory, "wanted": bytes that requests wait for}

A record of another version counts as nothing held or wanted. A file `.<pid>-<random>.new` is of an engine
that starts, or that was killed while it did; nobody reads it.

An engine that cannot grow writes what it wants; the others see it within POLL_S and give idle memory back to
the device, and the first one tries again. Nobody waits for an answer, and an engine that stops in the middle
holds up nobody. Engines that cannot see the folder (another user, another container) only see less free
memory.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ostinato.errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 0.1  # a step of 100 ms is the longest that an engine notices late; reading 8 files takes 0.2 ms
RECORD_BYTES = 128
VERSION = 1
_SUFFIX = ".engine"


class Others(NamedTuple):
    """All other engines together."""

    engines: int = 0
    held_bytes: int = 0
    wanted_bytes: int = 0


def peers_folder(device_uuid: str, root: Path | None = None) -> Path:
    """Folder of the engines of this user on a device; made if need be.

    ConfigError: it cannot be made, or others can write it.
    """
    if root is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        root = Path(runtime) if runtime else Path(tempfile.gettempdir())
    folder = root / f"ostinato-{os.getuid()}" / device_uuid
    for part in (folder.parent, folder):
        try:
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_share(part, error) from error
        state = part.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise ConfigError(f"{part}: must be a folder that only user {os.getuid()} can use; remove it")
    return folder


def _cannot_share(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"kv.share: {folder} cannot be used ({error.strerror or error}); let XDG_RUNTIME_DIR name a folder "
        "of this user on a local file system, or leave kv.share off"
    )


class MemoryPeers:
    """This engine's file, and what the others' say. `report` is for the engine's thread."""

    def __init__(
        self, folder: Path, *, wake: Callable[[], None] = lambda: None, poll_s: float = POLL_S
    ) -> None:
        """Start to watch; while another engine wants memory, `wake` is called on the watching thread.

        ConfigError: no files, or no locked ones, can be made in the folder.
        """
        self._folder = folder
        self._wake = wake
        self._poll_s = poll_s
        self._others = Others()
        self._last: dict[str, tuple[int, int]] = {}  # file -> held, wanted
        self._reported = (0, 0)
        self._is_heard = True
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._file, new = folder / f"{name}{_SUFFIX}", folder / f".{name}.new"
        try:
            self._fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_share(folder, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(0, 0)
            new.rename(self._file)
        except OSError as error:  # a file system without locks, or without room
            os.close(self._fd)
            new.unlink(missing_ok=True)
            raise _cannot_share(folder, error) from error
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ostinato-peers", daemon=True)
        self._thread.start()

    @property
    def others(self) -> Others:
        """What was seen last, at most `poll_s` ago."""
        return self._others

    def report(self, held_bytes: int, wanted_bytes: int) -> None:
        """Tell the others; costs nothing if nothing has changed. That it cannot be told is logged once."""
        if self._reported == (held_bytes, wanted_bytes):
            return
        self._reported = (held_bytes, wanted_bytes)
        try:
            self._write(held_bytes, wanted_bytes)
            self._is_heard = True
        except OSError as error:
            if self._is_heard:
                log.warning("engines on this device are not told what this one lacks: %s", error)
            self._is_heard = False

    def _write(self, held_bytes: int, wanted_bytes: int) -> None:
        record = json.dumps({"version": VERSION, "held": held_bytes, "wanted": wanted_bytes})
        os.pwrite(self._fd, record.ljust(RECORD_BYTES).encode(), 0)

    def read(self) -> Others:
        """Look into the folder now; the watching thread does it every `poll_s`."""
        seen: dict[str, tuple[int, int]] = {}
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_SUFFIX) and entry.name != self._file.name:
                told = self._told(entry)
                if told is not None:
                    seen[entry.name] = told
        self._last = seen
        held, wanted = (sum(values) for values in zip((0, 0), *seen.values(), strict=True))
        return Others(len(seen), held, wanted)

    def close(self) -> None:
        """Leave; safe to call twice."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)
        os.close(self._fd)

    def _told(self, entry: os.DirEntry[str]) -> tuple[int, int] | None:
        """Held and wanted bytes of another engine; None if it is dead."""
        try:
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # locked: its engine lives
                record = json.loads(os.pread(fd, RECORD_BYTES, 0))
                if record["version"] != VERSION:
                    return 0, 0
                return int(record["held"]), int(record["wanted"])
            Path(entry.path).unlink(missing_ok=True)
            return None
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
        ):  # half a record: what it said before
            return self._last.get(entry.name, (0, 0))
        finally:
            os.close(fd)

    def _watch(self) -> None:
        is_blind = False
        while not self._ending.wait(self._poll_s):
            try:
                self._others, is_blind = self.read(), False
            except OSError as error:  # no folder, or no file descriptor is left: it may come back
                self._others = Others()
                if not is_blind:
                    log.warning("engines on this device cannot be seen: %s", error)
                is_blind = True
            if self._others.wanted_bytes:
                self._wake()
