"""Kernels compiled by other processes are those that this one would make; failures say which and why."""

import hashlib
import json
import math
import os
import queue
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
import json, os, signal, sys
with open({pids!r}, "a") as pids:
    print(os.getpid(), "TRITON_INTERPRET" in os.environ, file=pids)
for line in sys.stdin:
    key = json.loads(line)[1]
    if key.startswith("deadly"):
        print("LLVM ERROR: not amused", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    binary = dict(key=key, symbol="k", threads=32, shared=0, params=[], launch_pdl=False, offset=0, size=0)
    print(json.dumps(dict(binary=binary, cubin="")), flush=True)
"""


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers of a compiler that aborts over deadly variants; the file with their ids, and what they see."""
    script, pids = tmp_path / "worker", tmp_path / "pids"
    script.write_text(MORTAL.format(python=sys.executable, pids=str(pids)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return pids


def named(*keys: str) -> list[Variant]:
    return [PENDING._replace(key=key) for key in keys]


def compiled(variants: list[Variant], refused: dict[str, str] | None = None, workers: int = 1) -> list[str]:
    return [binary.key for binary, _ in compile_all(variants, 90, workers=workers, refused=refused)]


@pytest.mark.usefixtures("mortal")
def test_a_compiler_that_aborts_costs_its_kernel_alone() -> None:
    refused: dict[str, str] = {}
    keys = ["deadly 0", "deadly 1", "good 0", "deadly 2", "deadly 3", "deadly 4", "good 1"]
    assert compiled(named(*keys), refused) == ["good 0", "good 1"]
    assert list(refused) == [f"deadly {at}" for at in range(5)]
    assert set(refused.values()) == {"the compiling process ended: no answer"}
    said = r"kernel deadly 0 could not be compiled: no answer; .* said: LLVM ERROR: not amused"
    with pytest.raises(CompileError, match=said):
        compiled(named("deadly 0", "good 0"))


@pytest.mark.usefixtures("mortal")
def test_where_no_worker_lives_compiling_ends() -> None:
    refused: dict[str, str] = {}
    with pytest.raises(CompileError, match="kernel deadly 3 could not be compiled"):
        compiled(named("good 0", "deadly 0", "deadly 1", "deadly 2", "deadly 3", "good 1"), refused)
    assert list(refused) == ["deadly 0", "deadly 1", "deadly 2"]


@pytest.mark.usefixtures("mortal")
def test_a_failure_leaves_the_others_nothing_to_do() -> None:
    waiting: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    for variant in named("good 0", "deadly 0", "good 1"):
        waiting.put(variant)
    with pytest.raises(CompileError, match="kernel deadly 0"):
        kernel_workers._work(kernel_workers._Processes(), waiting, 90, None, math.inf)
    assert waiting.empty()


def test_each_core_has_a_worker_which_sees_no_interpreter_and_is_killed_once(
    mortal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    kill = os.killpg

    def note(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        assert not is_gone(str(pid)), "its id may be that of another process"
        killed.append(str(pid))
        kill(pid, number)

    monkeypatch.setattr(os, "killpg", note)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert compiled(named("a"), workers=0) == ["a"]
    assert sorted(compiled(named("a", "b", "c", "d"), workers=0)) == ["a", "b", "c", "d"]
    began = [line.split() for line in mortal.read_text().splitlines()]
    assert len(set(killed)) == len(killed) == 1 + 2
    assert all(pid in killed and sees == "False" for pid, sees in began)


@pytest.mark.usefixtures("mortal")
def test_the_largest_kernels_are_compiled_first() -> None:
    small, large = PENDING._replace(key="small"), SILU._replace(key="large")
    assert compiled([small, large]) == ["large", "small"]


def test_a_worker_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(CompileError, match=r"^kernels could not be compiled: .*/nowhere/python"):
        compiled(named("a"), {})


IDLE = """#!/bin/sh
sleep 600 &
echo $! $$ >> {pids}
wait
"""


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers that never answer, each with a child; the file that has their ids."""
    script, pids = tmp_path / "worker", tmp_path / "pids"
    script.write_text(IDLE.format(pids=pids))
    script.chmod(0o755)
    pids.touch()
    monkeypatch.setattr(sys, "executable", str(script))
    return pids


def is_gone(pid: str) -> bool:
    """Also one that nobody has waited for: it has no command line any more."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() == b""
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("refused", [None, {}])
def test_sigterm_ends_a_compile_at_once_with_its_workers_and_their_children(
    idle: Path, refused: dict[str, str] | None
) -> None:
    def kill_when_both_run() -> None:
        while len(idle.read_text().split()) < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=kill_when_both_run, daemon=True)
    killer.start()
    began = time.monotonic()
    with pytest.raises(SystemExit), exits_on_sigterm():
        compiled([PENDING] * 20, refused, workers=2)
    killer.join()
    assert time.monotonic() - began < 20, "it waited for workers that sleep for 600 s"
    for pid in idle.read_text().split():
        while not is_gone(pid):  # a child is killed and not waited for
            time.sleep(0.01)


def test_a_worker_that_hangs_is_an_error_and_is_killed(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_workers, "LONGEST_S", 0.2)
    with pytest.raises(CompileError, match=r"kernel pending could not be compiled: no answer in 0\.2 s"):
        compiled([PENDING] * 20, workers=2)
    for pid in idle.read_text().split():
        while not is_gone(pid):
            time.sleep(0.01)


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
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert list(compile_all([], 90)) == []
    assert list(compile_all([PENDING], 90, until=time.monotonic())) == []
