"""The native CPU kernels: built once from `ops/*.cpp` by the system's C++ compiler, then loaded by ctypes.

Building belongs to `compile-model` (a few seconds, plain C ABI, no torch headers); loading needs no compiler.
The kernels have a thread team of their own (native.cpp) of the size that `torch.set_num_threads` has set.
`bind` returns callables with the signatures of the torch ops.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ostinato.errors import ArtifactError, CompileError
from ostinato.ops import linear, native_calls

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
    # No -ffast-math: NaN and infinity must pass, and it would switch denormals off for the whole process.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
LINK_FLAGS = ("-shared", "-Wl,--as-needed", "-Wl,--build-id=none")
# A macro that a compiler predefines when it may use an extension, and the name in /proc/cpuinfo.
FEATURES = {
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512BW__": "avx512bw",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_BF16__": "amx_bf16",
    "__ARM_NEON": "asimd",
    "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}


class BuildInfo(NamedTuple):
    """How a library was made, and what a CPU must have to run it (`cpu_features`, see `missing_features`)."""

    compiler: str
    version: str
    flags: tuple[str, ...]
    source_hash: str
    cpu_features: tuple[str, ...]
    seconds: float


def sources() -> list[Path]:
    """Headers and translation units, in a fixed order."""
    return sorted([*SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cpp")])


def source_hash() -> str:
    """sha256 over kernel sources and flags: a library of another hash holds other kernels."""
    digest = hashlib.sha256("\0".join((*FLAGS, *LINK_FLAGS)).encode())
    for path in sources():
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cpu_features() -> tuple[str, ...]:
    """The extensions of this CPU that matter to a build, sorted. Empty where /proc/cpuinfo is missing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    present: set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            present = set(value.split())
            break
    return tuple(sorted(present & set(FEATURES.values())))


def missing_features(needed: tuple[str, ...]) -> tuple[str, ...]:
    """What a library with `BuildInfo.cpu_features == needed` lacks here; empty means that it may run."""
    return tuple(sorted(set(needed) - set(cpu_features())))


def build(out: Path, *, march: str = "native", cxx: str | None = None) -> BuildInfo:
    """Compile all kernels into the shared library `out` (replaced atomically; same input, same bytes).

    `march` is the compiler's name of a CPU ("native": this one). Raises CompileError without a compiler,
    for an unknown `march`, and when a source does not compile.
    """
    started = time.perf_counter()
    compiler = _find_compiler(cxx)
    flags = (*FLAGS, f"-march={march}")
    version = _run([compiler, "--version"], march).splitlines()[0]
    macros = _run([compiler, f"-march={march}", "-dM", "-E", "-x", "c++", os.devnull], march)
    defined = {line.split()[1] for line in macros.splitlines() if line.startswith("#define")}
    features = tuple(sorted({name for macro, name in FEATURES.items() if macro in defined}))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".kernels-") as folder:
        made = Path(folder).resolve()
        units = [path.stem for path in sources() if path.suffix == ".cpp"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[compiler, *flags, "-c", f"{unit}.cpp", "-o", f"{made}/{unit}.o"] for unit in units]
            list(pool.map(lambda command: _run(command, march), commands))
        objects = [f"{made}/{unit}.o" for unit in units]
        _run([compiler, *LINK_FLAGS, *objects, "-o", f"{made}/{out.name}"], march)
        (made / out.name).replace(out)
    return BuildInfo(
        compiler, version, (*flags, *LINK_FLAGS), source_hash(), features, time.perf_counter() - started
    )


def _find_compiler(cxx: str | None) -> str:
    for name in (cxx,) if cxx else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    tried = cxx or ", ".join(COMPILERS)
    raise CompileError(
        f"native kernels: no C++ compiler found (tried {tried} in PATH); "
        "install one, for example `apt-get install g++`. Serving a finished artifact needs none"
    )


def _run(command: list[str], march: str) -> str:
    done = subprocess.run(command, cwd=SOURCE_DIR, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    raise CompileError(
        f"native kernels: {command[0]} failed for -march={march} on {platform.machine()}: "
        f"{' | '.join(errors[:3]) or 'no message'}; try a newer compiler (g++ >= 10, clang++ >= 11) "
        'or another target ("native" is this machine)'
    )


def load(path: Path) -> ctypes.CDLL:
    """Load a library made by `build`; its team follows torch's thread number. Raises ArtifactError."""
    try:
        library = ctypes.CDLL(str(path))
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        num_threads = torch_library._ZN2at15get_num_threadsEv  # at::get_num_threads(), of the calling thread
        library.set_team(ctypes.cast(num_threads, ctypes.c_void_p))
    except (OSError, AttributeError) as error:
        raise ArtifactError(f"native kernels: cannot load {path}: {error}; compile the model here") from error
    return library


def bind(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Callables by op name, each with its op's signature: torch tensors in, torch tensors out."""
    return {
        "aten::linear": linear.bind(library),
        "ostinato::add_rms_norm": native_calls.bind_add_rms_norm(library),
        "ostinato::gelu_tanh_mul": native_calls.bind_gelu_tanh_mul(library),
        "ostinato::kv_write": native_calls.bind_kv_write(library),
        "ostinato::paged_attention": native_calls.bind_paged_attention(library),
        "ostinato::rms_norm": native_calls.bind_rms_norm(library),
        "ostinato::rope_kv_write": native_calls.bind_rope_kv_write(library),
        "ostinato::silu_mul": native_calls.bind_silu_mul(library),
    }
