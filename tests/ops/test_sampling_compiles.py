"""The interpreter accepts more than the compiler: the sampling kernels, compiled for an absent GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_sampling_kernels_compile_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_sampling"],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    made = [line.removeprefix("ostinato.ops.").split() for line in process.stdout.splitlines()]
    assert [name for name, _ in made] == [
        "sample._best_kernel",
        "sample_cut.bins_kernel",
        "sample_cut.bins_kernel",
        "sample_cut.collect_kernel",
        "sample._finish_kernel",
        "token_scores._kernel",
        "token_scores._combine",
    ]
    assert all(int(num_bytes) > 1000 for _, num_bytes in made)
