"""Benchmark records: a table on the screen and a JSON file in `benchmarks/results/`, with what a reader must
know.

A record is `{"header": {gpu, driver, cpu, torch, triton, commit, date, command, load}, "rows": [...]}`; a row
has metric, value (the median), unit, baseline, ratio (value / baseline), n, spread (max - min) and what the
baseline is.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


class Row(NamedTuple):
    """One figure and what it is measured against."""

    metric: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    n: int
    spread: float
    against: str

    @classmethod
    def of(
        cls, metric: str, samples: Sequence[float], unit: str, baseline: float | None, against: str
    ) -> Row:
        """Median and spread of `samples`; `baseline` None: it could not run, and `against` says why."""
        value = statistics.median(samples)
        ratio = value / baseline if baseline else None
        return cls(metric, value, unit, baseline, ratio, len(samples), max(samples) - min(samples), against)


def header() -> dict[str, object]:
    """Machine, versions and commit of this run; `load` is the load average before it, 0 for an idle machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if gpu
        else None,
        "cpu": _cpu(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "load": round(os.getloadavg()[0], 2),
    }


def write_record(name: str, rows: Sequence[Row], *, start: dict[str, object] | None = None) -> None:
    """Print the rows and write `results/<name>.json`; `start` is a header taken before the run, for its load."""
    record = {"header": start or header(), "rows": [row._asdict() for row in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["header"]))
    for row in rows:
        ratio = (
            f"{row.ratio:7.2f}x of {row.baseline:.4g}" if row.ratio is not None else " " * 8 + "no baseline"
        )
        print(
            f"{row.metric:44} {row.value:10.4g} {row.unit:8} {ratio} ({row.against}), n={row.n}, ±{row.spread:.2g}"
        )


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} x {names[0]}" if names else "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    commit = _first_line("git", "rev-parse", "--short=12", "HEAD")
    return commit + (
        "+changes" if _first_line("git", "status", "--porcelain", "--untracked-files=no") else ""
    )


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return (done.stdout.splitlines() or [""])[0].strip()
