"""Kernels compiled by other processes are those that this one would make; failures say which and why."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ostinato.errors import CompileError
from ostinato.ops.kernel_store import Variant
from ostinato.runtime.gpu import kernel_workers
from ostinato.runtime.gpu.kernel_workers import compile_all
from ostinato.runtime.sigterm import exits_on_sigterm

pytest.importorskip("triton", reason="Triton exists for Linux only")
SILU = Variant(
    "silu",
    "ostinato.ops.silu_mul",
    "_kernel",
    ("gate", "up", "out", "gate_stride", "up_stride", "F", "BLOCK", "PDL"),
    (
        *[("*bf16", True)] * 3,
        *[("i32", True), ("i32", False), ("i32", True)],
        ("const", 1024),
        ("const", True),
    ),
    (4, None, True, None),
)
PENDING = Variant(
    "pending",
    "ostinato.ops.take_pending",
    "_kernel",
    ("token_ids", "last_tokens", "num_tokens", "BLOCK"),
    (("*i64", True), ("*i64", True), ("i32", False), ("const", 256)),
    (4, None, None, None),
)
HERE = """
import hashlib, json, sys
from ostinato.ops import silu_mul
from ostinato.ops.kernel_store import Variant
from ostinato.runtime.gpu import kernel_workers
from ostinato.ops.triton_kernels import compile_variant
raw = json.loads(sys.argv[1])
variant = Variant(*raw[:4], tuple((kind, value) for kind, value in raw[4]), tuple(raw[5]))
binary, cubin = compile_variant(silu_mul._kernel.made(), variant, 90)
print(binary.model_dump_json(), hashlib.sha256(cubin).hexdigest())
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("own_cache")
def test_workers_make_the_same_binaries_as_this_process(tmp_path: Path) -> None:
    made = {binary.key: (binary, cubin) for binary, cubin in compile_all([PENDING, SILU], 90, workers=2)}
    assert set(made) == {"silu", "pending"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "other")  # really compiled again
    done = subprocess.run(
        [sys.executable, "-c", HERE, json.dumps(SILU)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    binary, cubin = made["silu"]
    assert done.stdout.split() == [binary.model_dump_json(), hashlib.sha256(cubin).hexdigest()]
    assert binary.params == ("ptr", "ptr", "ptr", "i32", "i32", "i32", "ptr", "ptr")
    assert (binary.threads, binary.launch_pdl, made["pending"][0].launch_pdl) == (128, True, False)


@pytest.mark.usefixtures("own_cache")
def test_a_kernel_that_does_not_compile_is_named_with_the_reason() -> None:
    wrong = PENDING._replace(key="wrong", function="_no_kernel")
    with pytest.raises(CompileError, match=r"kernel wrong could not be compiled: .*_no_kernel"):
        list(compile_all([wrong], 90, workers=1))


@pytest.mark.usefixtures("own_cache")
def test_who_asks_for_refusals_gets_them_and_all_that_can_be_compiled() -> None:
    wrong = PENDING._replace(key="wrong", function="_no_kernel")
    refused: dict[str, str] = {}
    made = list(compile_all([wrong, PENDING], 90, workers=1, refused=refused))
    assert [binary.key for binary, _ in made] == ["pending"]
    assert refused.keys() == {"wrong"}
    assert "_no_kernel" in refused["wrong"]
    assert list(compile_all([PENDING], 90, workers=1, until=time.monotonic())) == []


def test_a_worker_that_dies_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CompileError, match="kernel pending could not be compiled"):
        list(compile_all([PENDING], 90, workers=1))


MORTAL = """#!{python}
import sys
sys.argv = ["kernel_workers"]
from ostinato.ops import take_pending
from ostinato.runtime.gpu import kernel_workers
if not hasattr(take_pending, "_aborts"):
    class Aborts:
        def compile(self, *_):
            import os
            os.abort()
    take_pending._aborts = Aborts()
kernel_workers.main()
"""


@pytest.mark.usefixtures("own_cache")
def test_a_compiler_that_aborts_costs_its_kernel_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker"
    script.write_text(MORTAL.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    deadly = [PENDING._replace(key=f"deadly {at}", function="_aborts") for at in range(2)]
    refused: dict[str, str] = {}
    made = list(compile_all([*deadly, PENDING], 90, workers=1, refused=refused))
    assert [binary.key for binary, _ in made] == ["pending"]
    assert refused == dict.fromkeys(("deadly 0", "deadly 1"), "the compiling process ended: no answer")
    with pytest.raises(CompileError, match=r"kernel deadly 0 could not be compiled: .*no answer"):
        list(compile_all(deadly, 90, workers=1))
    three = [PENDING._replace(key=f"deadly {at}", function="_aborts") for at in range(3)]
    with pytest.raises(CompileError, match="kernel deadly 2 could not be compiled"):
        list(compile_all([*three, PENDING], 90, workers=1, refused={}))


IDLE = """#!/bin/sh
echo $$ >> {pids}
exec sleep 600
"""


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers that never answer; the file that has their ids."""
    script, pids = tmp_path / "worker", tmp_path / "pids"
    script.write_text(IDLE.format(pids=pids))
    script.chmod(0o755)
    pids.touch()
    monkeypatch.setattr(sys, "executable", str(script))
    return pids


def is_gone(pid: str) -> bool:
    return not Path("/proc", pid).exists()


def test_sigterm_ends_a_compile_at_once_and_its_workers(idle: Path) -> None:
    def kill_when_both_run() -> None:
        while len(idle.read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=kill_when_both_run)
    killer.start()
    began = time.monotonic()
    with pytest.raises(SystemExit), exits_on_sigterm():
        list(compile_all([PENDING] * 20, 90, workers=2))
    killer.join()
    assert time.monotonic() - began < 20, "it waited for workers that sleep for 600 s"
    assert all(is_gone(pid) for pid in idle.read_text().split())


def test_a_worker_that_hangs_is_an_error_and_is_killed(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_workers, "LONGEST_S", 0.2)
    with pytest.raises(CompileError, match=r"kernel pending could not be compiled: no answer in 0\.2 s"):
        list(compile_all([PENDING] * 20, 90, workers=2))
    assert all(is_gone(pid) for pid in idle.read_text().split())


@pytest.mark.usefixtures("idle")
def test_nothing_is_begun_once_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], []

    def ask(process: object, variant: Variant, capability: int) -> tuple[str, bytes]:
        clock[0] += 2.0
        asked.append(variant)
        return variant.key, b""

    monkeypatch.setattr(kernel_workers, "_ask", ask)
    monkeypatch.setattr(kernel_workers.time, "monotonic", lambda: clock[0])
    assert len(list(compile_all([PENDING] * 5, 90, workers=1, until=3.0))) == len(asked) == 2


def test_nothing_to_compile_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert list(compile_all([], 90)) == []
    assert list(compile_all([PENDING], 90, until=time.monotonic())) == []
