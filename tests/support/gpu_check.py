"""What needs a GPU, part by part: unit tests, end-to-end tests, compute-sanitizer, benchmarks.

    scripts/gpu_check [PART...] [--budget 570] [--out FILE]
    scripts/gpu_check --unpack FILE

Each part has a time limit and ends with one line; what does not fit into the budget (seconds) is not begun.
The unit tests compile kernels on one core each, so they are dealt out to processes that run at once.
The file has the verdicts, the end of each log, and the records that benchmarks wrote, for `--unpack` to put
where they belong on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
UNIT = ("tests/ops", "tests/runtime/sampling")
# shared memory or work that several programs share: what a race could be in
RACY = (
    "paged_attention",
    "rope_attention",
    "skinny_linear",
    "skinny_gated",
    "sample",
    "wgmma_linear",
    "wgmma_prefill",
)
LIBRARY = ("--kernel-name-exclude", "kernel_substring=nvjet")  # cuBLAS, in which racecheck sees races
LOG_CHARACTERS = 6000
# a checker that the machine does not let look into the GPU
REFUSALS = ("Device not supported", "not supported on this device", "Unable to find injection library")


@dataclass
class Verdict:
    """How a run ended."""

    part: str
    state: str  # ok, failed, out of time, cannot run here, not begun
    seconds: float
    said: str  # its last line
    log: str = ""

    def line(self) -> str:
        return f"{self.part:16} {self.state:16} {self.seconds:6.1f} s  {self.said[:110]}"


@dataclass(frozen=True)
class Part:
    """A command, or the tests of some folders dealt out to processes."""

    name: str
    limit_s: int
    command: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    processes: int = 1
    per_file: int = 0  # at most so many tests of each file; 0: all
    checker: str = ""  # of compute-sanitizer
    only: tuple[str, ...] = ()  # names of test files, without test_ and .py; none: all
    named: str = ""  # what the name of each test has in it
    environment: tuple[tuple[str, str], ...] = ()


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _pytest(*arguments: str) -> tuple[str, ...]:
    return _module("pytest", "-m", "gpu", "--durations=5", *arguments)


def _benchmark(name: str, limit_s: int, *arguments: str) -> Part:
    return Part(f"bench-{name}", limit_s, command=_module(f"benchmarks.gpu_{name}", *arguments))


# Every allocation on its own, so that memcheck sees the ends of tensors.
NO_CACHE = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
PARTS = (
    Part("unit", 170, tests=UNIT, processes=12),
    Part("memory", 60, command=_pytest("tests/runtime/memory")),  # alone: it looks at what is free
    Part(
        "e2e",
        400,
        command=_pytest(
            "tests/e2e/test_gpu.py",
            "tests/e2e/test_gpu_process.py",
            "tests/e2e/test_gpu_tuning.py",
            "tests/e2e/test_gpu_attention_library.py",
        ),
    ),
    Part("e2e-serve", 240, command=_pytest("tests/e2e/test_gpu_serve.py")),
    Part("e2e-embed", 90, command=_pytest("tests/e2e/test_embeddings.py")),
    Part("memcheck", 300, tests=UNIT, processes=8, per_file=3, checker="memcheck", environment=NO_CACHE),
    Part("racecheck", 300, tests=UNIT[:1], processes=7, per_file=2, checker="racecheck", only=RACY),
    _benchmark("engine", 300),
    _benchmark("linears", 90),
    _benchmark("attention", 90),
    _benchmark("sampling", 90),
    _benchmark("kv_memory", 90),
    _benchmark("kv_sharing", 120),
    Part(
        "race",  # 10 minutes, together
        400,
        tests=("tests/e2e/test_gpu.py",),
        named="random_arrivals",
        processes=4,
        environment=(("OSTINATO_RACES", "4"), ("OSTINATO_RACE_S", "150")),
    ),
)


def run(part: Part, limit_s: float) -> list[Verdict]:
    """One verdict for each process of a part."""
    if part.checker and shutil.which("compute-sanitizer") is None:
        return [Verdict(part.name, "cannot run here", 0.0, "there is no compute-sanitizer")]
    environment = os.environ | dict(part.environment)
    if not part.tests:
        return [run_command(part.name, part.command, limit_s, environment)]
    began = time.monotonic()
    ids = chosen(collect(part.tests, environment), part)
    if not ids:
        return [Verdict(part.name, "failed", time.monotonic() - began, "no test was found")]
    hands = deal(ids, part.processes)
    left = limit_s - (time.monotonic() - began)
    # no errors of API calls: a driver that lacks functions which cuda-python asks for is none of ours
    options = ("--error-exitcode", "86", "--report-api-errors", "no", *LIBRARY)
    checker = ("compute-sanitizer", "--tool", part.checker, *options) if part.checker else ()

    def one(hand: tuple[int, list[str]]) -> Verdict:
        at, mine = hand
        name = f"{part.name}.{at + 1}" if len(hands) > 1 else part.name
        return run_command(name, (*checker, *_pytest(*mine)), left, environment)

    with ThreadPoolExecutor(len(hands)) as threads:
        return list(threads.map(one, enumerate(hands)))


def run_command(name: str, command: Sequence[str], limit_s: float, environment: dict[str, str]) -> Verdict:
    """Run to its end or to the limit, when the whole process group is killed."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        output.seek(0)
        log = output.read().decode(errors="replace")
    lines = [line for line in log.splitlines() if line.strip()]
    said = lines[-1].strip(" =") if lines else ""
    state = "out of time" if code is None else "ok" if code == 0 else "failed"
    refusal = next((line for line in lines if any(word in line for word in REFUSALS)), None)
    if state == "ok" and " skipped" in said and " passed" not in said:
        state = "cannot run here"
    if state == "failed" and refusal is not None:
        state, said = "cannot run here", refusal
    return Verdict(name, state, round(time.monotonic() - began, 1), said, log[-LOG_CHARACTERS:])


def collect(folders: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Ids of the tests for a GPU. `environment`: instead of this process's."""
    command = _module("pytest", "-m", "gpu", "--collect-only", "-q", "-o", "addopts=", *folders)
    listed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    ).stdout
    return [line for line in listed.splitlines() if "::" in line]


def chosen(ids: Sequence[str], part: Part) -> list[str]:
    """The tests of a part. A checker is not run on captured graphs, whose memory is the cache's."""
    taken: dict[str, list[str]] = {}
    for name in ids:
        file = name.partition("::")[0]
        stem = Path(file).stem.removeprefix("test_")
        if (part.only and stem not in part.only) or part.named not in name:
            continue
        if part.checker and any(word in name for word in ("graph", "captur", "replay", "2_31", "int32")):
            continue
        of_file = taken.setdefault(file, [])
        if not part.per_file or len(of_file) < part.per_file:
            of_file.append(name)
    return [name for of_file in taken.values() for name in of_file]


def deal(ids: Sequence[str], hands: int) -> list[list[str]]:
    """Round and round, so that each process gets a part of the slow files."""
    return [list(ids[at::hands]) for at in range(min(hands, len(ids)))]


def unpack(path: Path) -> None:
    """Put the records of another machine's run where they belong."""
    for name, record in json.loads(path.read_text())["records"].items():
        if Path(name).name != name:
            raise SystemExit(f"{path}: {name!r} is not the name of a record")
        (RESULTS / name).write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: benchmarks/results/{name}")


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="scripts/gpu_check")
    names = [part.name for part in parts]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all if none")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu_check.json")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="write the records of a run, run nothing")
    asked = parser.parse_args(arguments)
    if asked.unpack is not None:
        unpack(asked.unpack)
        return 0
    if unknown := sorted(set(asked.parts) - set(names)):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(names)}")
    began, began_at = time.monotonic(), time.time()
    verdicts: list[Verdict] = []
    for part in parts:
        if asked.parts and part.name not in asked.parts:
            continue
        left = asked.budget - (time.monotonic() - began)
        if left < min(part.limit_s, 30):
            made = [Verdict(part.name, "not begun", 0.0, f"{max(left, 0):.0f} s of the budget are left")]
        else:
            made = run(part, min(part.limit_s, left))
        for verdict in made:
            print(verdict.line(), flush=True)
            if verdict.state in ("failed", "out of time"):
                print(verdict.log[-1500:], flush=True)
        verdicts += made
        written = [path for path in RESULTS.glob("*.json") if path.stat().st_mtime >= began_at]
        records = {path.name: json.loads(path.read_text()) for path in written}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        told = {"verdicts": [asdict(verdict) for verdict in verdicts], "records": records}
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(verdict.state in ("failed", "out of time") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
