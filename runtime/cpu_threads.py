"""How many threads compute, on which cores: chosen and bound once, by the thread that runs the engine.

OpenMP keeps one pool per thread that starts parallel work, so `bind` must run on the engine's own thread; the
pool that it creates there is the one that every later step uses, torch's and our kernels' alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ostinato.errors import ConfigError
from ostinato.runtime.config import CpuConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadPlan:
    """Compute threads of one engine."""

    threads: int
    cores: tuple[int, ...]  # logical CPU of each thread; empty: not bound
    reason: str  # where the number comes from, for the start-up log


def plan_threads(
    config: CpuConfig, *, allowed: Iterable[int] | None = None, root: Path = Path("/")
) -> ThreadPlan:
    """Choose the threads: one for each physical core that this process may use, at most the cgroup's quota.

    `allowed` is the affinity mask (default: this process's own); `root` is where /sys and /proc are read.
    Raises ConfigError when more threads are asked for than there are logical CPUs.
    """
    mask = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = _one_per_core(mask, root)
    quota = _quota(root)
    threads, reason = len(cores), f"{len(cores)} physical cores"
    if quota is not None and max(1, int(quota)) < threads:
        threads, reason = max(1, int(quota)), f"cgroup quota of {quota:g} CPUs"
    if config.threads:
        if config.threads > len(mask):
            raise ConfigError(
                f"cpu.threads={config.threads}: this process may use {len(mask)} logical CPUs; "
                f"give at most that, or 0 for one per physical core ({threads})"
            )
        threads, reason = config.threads, "cpu.threads"
    if not config.bind:
        return ThreadPlan(threads, (), reason)
    order = cores + [cpu for cpu in mask if cpu not in set(cores)]  # siblings only when more are asked for
    return ThreadPlan(threads, tuple(order[:threads]), reason)


@contextmanager
def bound_threads(plan: ThreadPlan, *, start_team: Callable[[], None] | None = None) -> Iterator[None]:
    """Give the calling thread its compute threads, bound as planned; undo the process-wide part at the end.

    `start_team` starts the threads of a second pool, that of the native kernels; both pools share the cores,
    of which one at a time has work. Torch's pool lives as long as the calling thread, so a thread of its own
    should call this.
    """
    before_count, before_mask = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(plan.threads)
    try:
        if plan.cores:
            for start in (_start_torch, start_team):
                if start is not None:
                    _bind(plan.cores, start)
        log.info("cpu: %d threads (%s), cores %s", plan.threads, plan.reason, plan.cores or "not bound")
        yield
    finally:
        torch.set_num_threads(before_count)
        os.sched_setaffinity(0, before_mask)


def _start_torch() -> None:
    # Past ATen's grain of 32768 elements per thread, so that all threads start.
    torch.zeros(torch.get_num_threads() << 16).add_(1.0)


def _bind(cores: tuple[int, ...], start: Callable[[], None]) -> None:
    """Start a pool and bind each of its threads to one core; the calling thread has the first."""
    before = _thread_ids()
    start()
    new = sorted(_thread_ids() - before)
    os.sched_setaffinity(0, {cores[0]})
    if not new and start is not _start_torch:
        return  # the team of an earlier engine in this process: it was bound then
    if len(new) != len(cores) - 1:
        # A pool made earlier on this thread, or a thread that started just now: better unbound than wrong.
        log.warning("cpu: %d threads started instead of %d, left unbound", len(new), len(cores) - 1)
        os.sched_setaffinity(0, set(cores))
        return
    for thread_id, core in zip(new, cores[1:], strict=True):
        os.sched_setaffinity(thread_id, {core})


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _one_per_core(mask: list[int], root: Path) -> list[int]:
    """The first allowed logical CPU of each physical core."""
    firsts: dict[str, int] = {}
    for cpu in mask:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            core = (folder / "thread_siblings_list").read_text().strip()
        except OSError:
            core = f"cpu{cpu}"  # no topology, as in some containers: each CPU is a core
        firsts.setdefault(core, cpu)
    return sorted(firsts.values())


def _quota(root: Path) -> float | None:
    """CPUs' worth of time that the cgroup of this process grants; None: no limit. Knows cgroup v2 and v1."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders = _upwards(root / "sys/fs/cgroup", path)
            limits += [_v2(folder / "cpu.max") for folder in folders]
        elif "cpu" in controllers.split(","):
            for mount in (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"):
                limits += [_v1(folder) for folder in _upwards(mount, path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """The group's folder and its parents up to the mount: each of them can set a limit."""
    folder = mount / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _v2(file: Path) -> float | None:
    words = " ".join(_lines(file)).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _v1(folder: Path) -> float | None:
    quota, period = (_lines(folder / f"cpu.cfs_{word}_us") for word in ("quota", "period"))
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
