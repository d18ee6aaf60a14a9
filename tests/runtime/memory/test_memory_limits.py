"""What is really free, read from made-up /proc and cgroup trees."""

import os
from pathlib import Path

import pytest

from ostinato.runtime.memory.memory_limits import MemoryLimits, MemoryState

MIB = 1 << 20
GIB = 1 << 30
V2 = "36 25 0:30 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "37 25 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "38 25 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


def machine(
    root: Path, *, own: str = "", mounts: str = "", total_mib: int = 8192, available_mib: int = 6144
) -> Path:
    write(
        root / "proc/meminfo",
        f"MemTotal: {total_mib << 10} kB\nMemAvailable: {available_mib << 10} kB\nDirty: 1 kB\n",
    )
    write(root / "proc/self/cgroup", own)
    write(root / "proc/self/mountinfo", "21 20 0:20 / / rw - ext4 /dev/vda rw\n" + mounts)
    return root


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group_v2(
    folder: Path, *, limit: object = "max", high: object = "max", used: int = 0, cache: int = 0
) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.high", f"{high}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 1\nfile {cache + 5}\ninactive_file {cache}\nactive_file 5\n")


def group_v1(folder: Path, *, limit: int = 9223372036854771712, used: int = 0, cache: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"inactive_file 9\ntotal_inactive_file {cache}\n")


def test_without_cgroups_it_is_what_the_kernel_calls_available(tmp_path):
    state = MemoryLimits(root=machine(tmp_path)).read()
    assert state == MemoryState(8 * GIB, 6 * GIB, "MemAvailable")


def test_headroom_is_taken_off_and_never_below_zero(tmp_path):
    root = machine(tmp_path)
    assert MemoryLimits(GIB, root).available() == 5 * GIB
    assert MemoryLimits(7 * GIB, root).available() == 0
    with pytest.raises(ValueError, match="headroom_bytes=-1"):
        MemoryLimits(-1, root)


def test_a_v2_limit_counts_and_page_cache_that_can_go_counts_as_free(tmp_path):
    root = machine(tmp_path, own="0::/app\n", mounts=V2.format(root="/"))
    group_v2(root / "sys/fs/cgroup/app", limit=2 * GIB, used=GIB, cache=256 * MIB)
    state = MemoryLimits(root=root).read()
    assert state[:2] == (2 * GIB, GIB + 256 * MIB)
    assert state.source.endswith("sys/fs/cgroup/app")


def test_a_tighter_parent_wins(tmp_path):
    root = machine(tmp_path, own="0::/slice/app\n", mounts=V2.format(root="/"))
    group_v2(root / "sys/fs/cgroup/slice", limit=3 * GIB, used=3 * GIB - 10 * MIB)
    group_v2(root / "sys/fs/cgroup/slice/app", limit=2 * GIB, used=GIB)
    state = MemoryLimits(root=root).read()
    assert state[:2] == (2 * GIB, 10 * MIB)
    assert state.source.endswith("slice")


def test_memory_high_is_a_limit_too_since_beyond_it_everything_crawls(tmp_path):
    root = machine(tmp_path, own="0::/app\n", mounts=V2.format(root="/"))
    group_v2(root / "sys/fs/cgroup/app", limit=4 * GIB, high=GIB, used=512 * MIB)
    assert MemoryLimits(root=root).read()[:2] == (GIB, 512 * MIB)


def test_more_used_than_allowed_is_nothing_free(tmp_path):
    root = machine(tmp_path, own="0::/app\n", mounts=V2.format(root="/"))
    group_v2(root / "sys/fs/cgroup/app", limit=GIB, used=2 * GIB)
    assert MemoryLimits(root=root).read().free_bytes == 0


def test_v1_limits_are_read_beside_an_empty_v2_hierarchy(tmp_path):
    own = "5:cpu,cpuacct:/elsewhere\n4:memory:/box\n0::/\n"
    root = machine(tmp_path, own=own, mounts=V2.format(root="/") + V1_CPU + V1.format(root="/"))
    group_v1(root / "sys/fs/cgroup/memory")
    group_v1(root / "sys/fs/cgroup/memory/box", limit=GIB, used=600 * MIB, cache=100 * MIB)
    assert MemoryLimits(root=root).read()[:2] == (GIB, 524 * MIB)


def test_a_container_that_sees_its_own_group_as_the_top_finds_it(tmp_path):
    root = machine(tmp_path, own="4:memory:/docker/abc\n", mounts=V1.format(root="/docker/abc"))
    group_v1(root / "sys/fs/cgroup/memory", limit=GIB, used=GIB // 2)
    assert MemoryLimits(root=root).read()[:2] == (GIB, GIB // 2)


def test_a_container_with_a_path_from_outside_reads_the_top(tmp_path):
    root = machine(tmp_path, own="0::/../other\n", mounts=V2.format(root="/docker/abc"))
    group_v2(root / "sys/fs/cgroup", limit=GIB, used=GIB // 4)
    group_v2(root / "sys/other", limit=1)  # where the path would lead if it were followed from the mount
    assert MemoryLimits(root=root).read()[:2] == (GIB, GIB - GIB // 4)


def test_limits_are_read_anew_each_time(tmp_path):
    root = machine(tmp_path, own="0::/app\n", mounts=V2.format(root="/"))
    group_v2(root / "sys/fs/cgroup/app", limit=GIB, used=0)
    limits = MemoryLimits(root=root)
    assert limits.available() == GIB
    group_v2(root / "sys/fs/cgroup/app", limit=GIB, used=GIB // 2)
    assert limits.available() == GIB // 2
    (root / "sys/fs/cgroup/app/memory.max").unlink()  # the group is gone or unreadable: the machine decides
    assert limits.available() == 6 * GIB


def test_a_system_that_does_not_tell_gives_half_of_its_memory(tmp_path):
    state = MemoryLimits(root=tmp_path).read()
    assert state.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert state.free_bytes == state.total_bytes // 2
    assert "half of physical memory" in state.source


def test_this_machine_has_some_memory_free():
    state = MemoryLimits().read()
    assert MIB < state.free_bytes <= state.total_bytes
