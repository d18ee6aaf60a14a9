"""The interpreter accepts more than the compiler: each kernel is compiled for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPS = [
    "silu_mul",
    "gelu_tanh_mul",
    "rms_norm",
    "add_rms_norm",
    "kv_write",
    "rope_table",
    "rope_kv_write",
    "paged_decode",
    "paged_prefill",
    "fa3_attention",
    "skinny_linear",
    "skinny_gated",
]


def test_every_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    made = dict(line.removeprefix("ostinato.ops.").split() for line in process.stdout.splitlines())
    assert list(made) == OPS
    assert all(int(num_bytes) > 1000 for num_bytes in made.values())
