"""Engines on one device see what the others hold and want; dead ones vanish."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.memory.memory_peers import RECORD_BYTES, MemoryPeers, Others, peers_folder

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


@pytest.mark.parametrize(
    ("record", "seen"),
    [
        ('{"version": 2, "held": 50, "wanted": 3}', (0, 0)),
        ('{"version": 1, "held": 1e999, "wanted": 3}', (50, 3)),
        ('{"version": 1, "held": null, "wanted": 3}', (50, 3)),
        ('["version", 1]', (50, 3)),
        ("17", (50, 3)),
        ("\x00", (50, 3)),
    ],
)
def test_a_record_that_says_nothing_usable_harms_no_reader(peers, record, seen):
    a, b = peers(), peers()
    a.report(50, 3)
    assert b.read() == Others(1, 50, 3)
    os.pwrite(a._fd, record.ljust(RECORD_BYTES).encode(), 0)
    assert b.read() == Others(1, *seen)


def test_a_file_system_without_locks_is_an_error_that_names_the_remedy(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    descriptors = len(os.listdir("/dev/fd"))
    with pytest.raises(ConfigError, match=r"No locks available\); let XDG_RUNTIME_DIR name .* local file"):
        MemoryPeers(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Not a directory.*or leave kv\.share off"):
        peers_folder("GPU-1", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"No such file or directory.*XDG_RUNTIME_DIR"):
        MemoryPeers(tmp_path / "gone")


def test_a_report_that_cannot_be_written_ends_no_engine_and_is_said_once(peers, monkeypatch, caplog):
    a, b = peers(), peers()
    with monkeypatch.context() as full:

        def pwrite(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(os, "pwrite", pwrite)
        a.report(50, 3)
        a.report(60, 3)
    assert caplog.text.count("No space left on device") == 1
    assert b.read() == Others(1, 0, 0)
    a.report(70, 3)
    assert b.read() == Others(1, 70, 3)


def test_an_engine_is_woken_while_another_wants_memory(peers):
    woken = threading.Event()
    peers(poll_s=0.01, wake=woken.set)
    a = peers()
    assert not woken.wait(0.1)
    a.report(0, 1)
    assert woken.wait(20)


def test_an_engine_that_could_not_look_for_a_while_looks_again(peers, monkeypatch, caplog):
    woken, looked = threading.Event(), threading.Semaphore(0)
    listed = os.scandir

    def scandir(_):
        looked.release()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as full:
        full.setattr(os, "scandir", scandir)
        one = peers(poll_s=0.01, wake=woken.set)
        assert all(looked.acquire(timeout=20) for _ in range(3))
        assert one.others == Others()
    assert os.scandir is listed
    peers().report(0, 1)
    assert woken.wait(20)
    assert caplog.text.count("cannot be seen") == 1


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
