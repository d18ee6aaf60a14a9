"""Benchmark records: `results/<name>.json`, one header about machine and code, one row per metric.

Run a benchmark from the repository root as a module, `python -m benchmarks.<name>`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured quantity."""

    metric: str  # stable over time: records are compared by it
    value: float  # median of the samples
    unit: str
    baseline: float | None  # in the same unit; None: it could not run, or there is none (`baseline_is`)
    baseline_is: str  # what it is, or why it is missing
    ratio: float | None  # value / baseline
    n: int
    spread: float  # (largest - smallest sample) / median

    @classmethod
    def of(
        cls, metric: str, samples: Sequence[float], unit: str, baseline: float | None, baseline_is: str
    ) -> Row:
        value = statistics.median(samples)
        return cls(
            metric,
            _rounded(value),
            unit,
            None if baseline is None else _rounded(baseline),
            baseline_is,
            _rounded(value / baseline) if baseline else None,
            len(samples),
            _rounded((max(samples) - min(samples)) / abs(value)) if value else 0.0,
        )


def write_record(name: str, rows: Sequence[Row]) -> Path:
    """Print header and rows, and write `results/<name>.json`; a second run replaces it."""
    about = header()
    print("; ".join(f"{name}: {said}" for name, said in about.items()))
    for row in rows:
        against = row.baseline_is if row.ratio is None else f"x{row.ratio:g} of {row.baseline_is}"
        print(f"{row.metric:44} {row.value:>10g} {row.unit:8} n={row.n} spread={row.spread:g}  {against}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"header": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")
    return path


def header() -> dict[str, str]:
    """What a reader needs to judge or to repeat the figures. Folders of this machine are not named."""
    arguments = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python", "-m", _module(), *arguments]),
    }


def _module() -> str:
    """The benchmark that runs, as `python -m` knows it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else f"benchmarks.{Path(sys.argv[0]).stem}"


def _commit() -> str:
    """The commit, with a mark when tracked files differ from it."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """The first line that the command prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
