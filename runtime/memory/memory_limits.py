"""How much memory is really free: what the kernel calls available, and what our cgroups still allow."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


class MemoryState(NamedTuple):
    """Bytes, and which limit is the tightest."""

    total_bytes: int
    free_bytes: int
    source: str  # "MemAvailable", or the cgroup's folder


class Limits(Protocol):
    """How much memory may still be taken from where the KV pool lives."""

    @property
    def headroom_bytes(self) -> int:
        """What is always left to others."""
        ...

    def read(self) -> MemoryState:
        """Total and free memory now."""
        ...

    def available(self) -> int:
        """Bytes that may be taken now: what is free, less the headroom; never negative."""
        ...


class _Group(NamedTuple):
    folder: Path
    limit_files: tuple[str, ...]
    usage_file: str
    cache_key: str  # of memory.stat: page cache that is given up before anybody is killed


_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


@dataclass
class MemoryLimits:
    """Reads /proc/meminfo and the memory cgroups (v1 and v2) of this process. One reading costs about 0.1 ms.

    `headroom_bytes` always stay with others; `root` is the file system to look into (tests make their own).
    Safe to use from any thread.
    """

    headroom_bytes: int = 0
    root: Path = Path("/")

    def __post_init__(self) -> None:
        if self.headroom_bytes < 0:
            raise ValueError(f"headroom_bytes={self.headroom_bytes}: must not be negative")
        self._groups = _memory_groups(self.root)

    def read(self) -> MemoryState:
        """Memory of the machine, lowered to what each cgroup from ours up to the root allows."""
        state = _machine(self.root)
        for group in self._groups:
            limit, free = _allowed(group)
            if limit < state.total_bytes:
                state = state._replace(total_bytes=limit)
            if free < state.free_bytes:
                state = state._replace(free_bytes=free, source=str(group.folder))
        return state

    def available(self) -> int:
        """Bytes that may be taken now: what is free, less the headroom; never negative."""
        return max(0, self.read().free_bytes - self.headroom_bytes)


def _machine(root: Path) -> MemoryState:
    fields: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable", "MemFree", "Cached"):
                fields[name] = int(value.split()[0]) << 10
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryState(
            total, total // 2, "half of physical memory (this system does not tell what is free)"
        )
    free = fields.get("MemAvailable", fields.get("MemFree", 0) + fields.get("Cached", 0))
    return MemoryState(fields["MemTotal"], free, "MemAvailable")


def _memory_groups(root: Path) -> list[_Group]:
    """Our memory cgroup and all above it, as far as they are visible (a container sees its own part)."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    paths = {}  # of our group in the hierarchy: v1 memory controller, v2
    for line in own:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    groups = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(" ")[-1].split(",")):
            continue
        mount_root, mount_point = before.split(" ")[3:5]
        top = root / mount_point.lstrip("/")
        inside = os.path.relpath(paths[kind], mount_root)
        folder = (
            top if inside.startswith("..") else top / inside
        )  # "..": we see only a part that is not ours by name
        groups += [_Group(f, *(_V1 if kind == "cgroup" else _V2)) for f in _upwards(folder, top)]
    return [group for group in groups if (group.folder / group.usage_file).exists()]


def _upwards(folder: Path, top: Path) -> list[Path]:
    return [f for f in (folder, *folder.parents) if f == top or top in f.parents]


def _allowed(group: _Group) -> tuple[int, int]:
    """(limit, free bytes) of a group; both huge if it sets none or cannot be read."""
    try:
        limit = min(map(_number, ((group.folder / name) for name in group.limit_files)))
        if limit >= _UNLIMITED:
            return _UNLIMITED, _UNLIMITED
        used = _number(group.folder / group.usage_file)
        stat = (group.folder / "memory.stat").read_text()
    except (OSError, ValueError) as error:
        log.debug("cgroup %s: %s", group.folder, error)
        return _UNLIMITED, _UNLIMITED
    cache = next(
        (int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == group.cache_key), 0
    )
    return limit, max(0, limit - used + cache)


def _number(file: Path) -> int:
    text = file.read_text().strip()
    return _UNLIMITED if text == "max" else int(text)
