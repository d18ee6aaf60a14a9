"""Triton stays out of a process that launches none of its kernels."""

import subprocess
import sys

import pytest

from ostinato.errors import EngineError
from ostinato.ops import launch


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_every_op_does_not_import_triton_and_asking_for_a_kernel_does() -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    code = """
import sys
from ostinato.ops import add_rms_norm, all_ops
from ostinato.ops.launch import triton_function
there = "triton" in sys.modules
late = add_rms_norm._kernel
body = late.fn
kernel = triton_function(late)
import triton
seen = kernel.fn.__globals__
print(
    there, kernel.fn.__code__ is body.__code__, late.arg_names[0], add_rms_norm._kernel is late,
    type(seen["scaled"]) is type(kernel), seen["tl"] is triton.language, triton_function(kernel) is kernel,
)
"""
    assert run(code) == "False True x True True True True"


def test_a_kernel_without_triton_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)

    @launch.jit(do_not_specialize=["x"])
    def kernel(x: int) -> None: ...

    with pytest.raises(EngineError, match=r"needs triton on a GPU, and .* install triton"):
        kernel[1](0)
