"""The interpreter accepts more than the compiler: each kernel is compiled for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dependent_launch import broken_waits

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


PTX = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 16 out
)
{
    griddepcontrol.launch_dependents;
    @%p1 bra $L__BB0_2;
    FIRST
    bra.uni $L__BB0_3;
$L__BB0_2:
    griddepcontrol.wait;
$L__BB0_3:
    st.shared.b32 [%r1], %r2;
    SECOND
    @%p2 st.global.b32 [%rd1], { %r1 };
    ret;
}
"""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("griddepcontrol.wait;", "", []),
        ("", "griddepcontrol.wait;", []),
        ("", "", ["@%p2 st.global.b32 [%rd1], { %r1 };", "ret;"]),
        ("atom.global.gpu.acq_rel.add.s32 %r3, [%rd2], 1;", "griddepcontrol.wait;", [
            "atom.global.gpu.acq_rel.add.s32 %r3, [%rd2], 1;"
        ]),
        ("@%p3 ret;", "griddepcontrol.wait;", ["@%p3 ret;"]),
    ],
)  # fmt: skip
def test_what_a_dependent_kernel_does_before_it_waits_is_found(
    first: str, second: str, found: list[str]
) -> None:
    assert broken_waits(PTX.replace("FIRST", first).replace("SECOND", second)) == found
