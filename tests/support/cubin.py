"""What a cubin says of its kernel: registers and memory of a thread, by the tool that Triton ships."""

import re
import subprocess
from pathlib import Path

import pytest


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Of its one kernel. REG: registers of a thread; STACK, LOCAL: bytes, where spilled registers go.

    Skips where Triton is not installed.
    """
    backend = pytest.importorskip(
        "triton.backends.nvidia", reason="Triton, which ships cuobjdump, is for Linux"
    )
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(next(iter(backend.__path__))) / "bin" / "cuobjdump"
    done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    (said,) = re.findall(r"^\s*(REG:.*)$", done.stdout, re.M)
    return {name: int(value) for name, value in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", said)}
