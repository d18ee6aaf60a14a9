"""Thread choice from faked /sys and /proc trees; binding on the real machine."""

import os
import threading

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.runtime.config import CpuConfig
from ostinato.runtime.cpu_threads import ThreadPlan, bound_threads, plan_threads


def fake_root(tmp_path, siblings=(), cgroup="", files=()):
    for cpu, text in enumerate(siblings):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for path, text in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def on_thread(action):
    """Run `action` on a thread of its own, as engines do: an OpenMP pool belongs to one thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    return results[0]


HYPERTHREADS = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"]


def test_one_thread_per_physical_core_not_per_hyperthread(tmp_path):
    plan = plan_threads(CpuConfig(), allowed=range(8), root=fake_root(tmp_path, HYPERTHREADS))
    assert (plan.threads, plan.cores) == (4, (0, 1, 2, 3))


def test_affinity_mask_limits_the_choice(tmp_path):
    plan = plan_threads(CpuConfig(), allowed=[1, 5, 6], root=fake_root(tmp_path, HYPERTHREADS))
    assert (plan.threads, plan.cores) == (2, (1, 6))


def test_siblings_are_used_only_when_more_threads_are_asked_for(tmp_path):
    plan = plan_threads(CpuConfig(threads=6), allowed=range(8), root=fake_root(tmp_path, HYPERTHREADS))
    assert (plan.threads, plan.cores) == (6, (0, 1, 2, 3, 4, 5))


def test_without_topology_every_cpu_is_a_core(tmp_path):
    plan = plan_threads(CpuConfig(), allowed=[0, 1, 2], root=fake_root(tmp_path))
    assert (plan.threads, plan.cores) == (3, (0, 1, 2))


@pytest.mark.parametrize(
    ("cgroup", "files", "threads"),
    [
        ("0::/pod/box\n", [("sys/fs/cgroup/pod/box/cpu.max", "200000 100000\n")], 2),
        ("0::/pod/box\n", [("sys/fs/cgroup/pod/cpu.max", "300000 100000")], 3),  # the parent's limit
        ("0::/pod/box\n", [("sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")], 4),
        ("0::/\n", [("sys/fs/cgroup/cpu.max", "50000 100000\n")], 1),  # half a CPU still needs a thread
        ("0::/\n", [("sys/fs/cgroup/cpu.max", "900000 100000\n")], 4),  # more than there are cores
        (
            "4:cpu,cpuacct:/box\n",
            [
                ("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "200000\n"),
                ("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n"),
            ],
            2,
        ),
        (
            "1:cpu:/\n0::/\n",
            [
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ],
            4,
        ),
    ],
)
def test_cgroup_quota_limits_the_default(tmp_path, cgroup, files, threads):
    root = fake_root(tmp_path, HYPERTHREADS, cgroup, files)
    plan = plan_threads(CpuConfig(), allowed=range(8), root=root)
    assert plan.threads == threads
    assert len(plan.cores) == threads


def test_the_users_number_wins_over_the_quota(tmp_path):
    root = fake_root(tmp_path, HYPERTHREADS, "0::/\n", [("sys/fs/cgroup/cpu.max", "100000 100000\n")])
    assert plan_threads(CpuConfig(threads=4), allowed=range(8), root=root).threads == 4


def test_more_threads_than_cpus_is_refused_with_the_fix(tmp_path):
    with pytest.raises(
        ConfigError, match=r"cpu.threads=9: this process may use 8 logical CPUs.*0 for one per"
    ):
        plan_threads(CpuConfig(threads=9), allowed=range(8), root=fake_root(tmp_path, HYPERTHREADS))


def test_no_binding_when_switched_off(tmp_path):
    plan = plan_threads(CpuConfig(bind=False), allowed=range(8), root=fake_root(tmp_path, HYPERTHREADS))
    assert (plan.threads, plan.cores) == (4, ())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to bind to")
def test_each_compute_thread_sits_on_its_own_core_and_stays_there():
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])

    def look():
        others = set(os.listdir("/proc/self/task"))
        with bound_threads(ThreadPlan(2, cores, "test")):
            workers = set(os.listdir("/proc/self/task")) - others
            for _ in range(3):  # work must not change it
                torch.randn(600, 600) @ torch.randn(600, 600)
                torch.zeros(1 << 20).add_(1)
            masks = [os.sched_getaffinity(int(worker)) for worker in workers]
            return os.sched_getaffinity(0), masks, torch.get_num_threads()

    own, others, threads = on_thread(look)
    assert (own, threads) == ({cores[0]}, 2)
    assert others.count({cores[1]}) == 1
    assert {cores[0]} not in others  # torch's unused second pool may exist; it is not bound


def test_thread_count_and_affinity_are_put_back():
    def look():
        before = torch.get_num_threads(), os.sched_getaffinity(0)
        with bound_threads(ThreadPlan(1, tuple(sorted(os.sched_getaffinity(0))[:1]), "test")):
            inside = torch.get_num_threads(), len(os.sched_getaffinity(0))
        return before, inside, (torch.get_num_threads(), os.sched_getaffinity(0))

    before, inside, after = on_thread(look)
    assert inside == (1, 1)
    assert after == before
