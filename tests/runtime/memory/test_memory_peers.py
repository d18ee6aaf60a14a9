"""Engines on one device see what the others hold and want; dead ones vanish."""

import os
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.memory.memory_peers import MemoryPeers, Others, peers_folder

SLOW_S = 3600.0  # tests look by hand


@pytest.fixture
def peers(tmp_path):
    made = []

    def join(**named) -> MemoryPeers:
        made.append(MemoryPeers(tmp_path, **{"poll_s": SLOW_S, **named}))
        return made[-1]

    yield join
    for one in made:
        one.close()
    assert list(tmp_path.iterdir()) == []


def test_each_engine_sees_the_sum_of_the_others(peers):
    a, b, c = peers(), peers(), peers()
    a.report(100, 7)
    b.report(20, 0)
    assert a.read() == Others(2, 20, 0)
    assert b.read() == Others(2, 100, 7)
    assert c.read() == Others(2, 120, 7)
    a.report(1 << 45, 0)
    assert c.read() == Others(2, (1 << 45) + 20, 0)
    b.close()
    assert c.read() == Others(1, 1 << 45, 0)


def test_an_engine_that_was_killed_is_removed_by_whoever_sees_its_file(peers, tmp_path):
    script = f"""
    import os, pathlib
    from ostinato.runtime.memory.memory_peers import MemoryPeers
    peers = MemoryPeers(pathlib.Path({str(tmp_path)!r}))
    peers.report(5, 5)
    os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120)
    assert len(list(tmp_path.iterdir())) == 1
    one = peers()
    assert one.read() == Others(0, 0, 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_half_a_record_counts_as_what_was_said_before(peers):
    a, b = peers(), peers()
    a.report(50, 3)
    assert b.read() == Others(1, 50, 3)
    os.pwrite(a._fd, b'{"held": 99', 0)
    os.ftruncate(a._fd, 11)
    assert b.read() == Others(1, 50, 3)


def test_an_engine_is_woken_while_another_wants_memory(peers):
    woken = threading.Event()
    peers(poll_s=0.01, wake=woken.set)
    a = peers()
    assert not woken.wait(0.1)
    a.report(0, 1)
    assert woken.wait(20)


def test_an_unchanged_report_writes_nothing(peers, monkeypatch):
    a = peers()
    a.report(1, 2)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
    a.report(1, 2)


def test_the_folder_belongs_to_one_user_and_one_device(tmp_path):
    first, other = peers_folder("GPU-1", tmp_path), peers_folder("GPU-2", tmp_path)
    assert first != other
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert peers_folder("GPU-1", tmp_path) == first
    first.chmod(0o755)
    with pytest.raises(ConfigError, match="GPU-1: must be a folder that only user"):
        peers_folder("GPU-1", tmp_path)


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / f"ostinato-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder"):
        peers_folder("GPU-1", tmp_path)


def test_the_runtime_folder_of_the_user_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert peers_folder("GPU-1") == tmp_path / f"ostinato-{os.getuid()}" / "GPU-1"
