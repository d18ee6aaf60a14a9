"""The native CPU kernels against torch's, at the shapes of SmolLM2-135M.

    python -m benchmarks.cpu_ops [--threads 2] [--rows 1 4 8 16 32] [--rounds 15]

For each linear layer, number of rows and type: GB/s of weights, its share of the machine's read bandwidth,
and torch's F.linear. Then the sum over a decode step's linear layers, and the time of one call of every other
op. Ours, torch's and a plain read loop take turns, so that a busy neighbour hits all of them alike. As in the
server, threads are bound and OpenMP's spin is short: a long one would take the core from the kernels' team.
"""

# ruff: noqa: E402  # the spin is read when torch is loaded
from __future__ import annotations

import os

from ostinato.runtime.openmp_spin import shorten_spin

shorten_spin(os.environ)

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.record import Row, write_record
from ostinato.ops import all_ops, native  # noqa: F401  # all_ops registers every op
from ostinato.runtime.config import CpuConfig
from ostinato.runtime.cpu_threads import bound_threads, plan_threads

LAYERS, VOCABULARY, WIDTH, FEED_FORWARD = 30, 49152, 576, 1536
HEADS, KV_HEADS, HEAD, BLOCK = 9, 3, 64, 16
LINEAR = {
    "qkv": (960, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate_up": (2 * FEED_FORWARD, WIDTH),
    "down": (WIDTH, FEED_FORWARD),
}
HEAD_SHAPE = (VOCABULARY, WIDTH)
PROBE_BYTES = 256 << 20
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# What reading can give: torch.sum does not prefetch, and reads half as fast as this where memory is fast.
READ_LOOP = """
#include <stddef.h>
extern "C" long read_all(const long *data, long lines) {
    long total = 0;
#pragma omp parallel for schedule(dynamic, 4096) reduction(+ : total)
    for (long i = 0; i < lines; i++) {
        __builtin_prefetch(data + (i + 384) * 8, 0, 2);
        __builtin_prefetch(data + (i + 640) * 8, 0, 2);
        for (int j = 0; j < 8; j++) total += data[i * 8 + j];
    }
    return total;
}
"""
Ops = dict[str, Callable[..., Any]]


def build_read_loop(folder: Path) -> Callable[[], object]:
    """Reads PROBE_BYTES once, on all threads of torch's OpenMP runtime."""
    library = folder / "read.so"
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(["g++", *flags], input=READ_LOOP, text=True, check=True)
    read_all = ctypes.CDLL(str(library)).read_all
    read_all.argtypes = [ctypes.c_void_p, ctypes.c_long]
    data = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    return lambda: read_all(data.data_ptr(), PROBE_BYTES // 64)


def race(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, taken in turns; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def linear_rows(
    ops: Ops, dtype: torch.dtype, rows: int, rounds: int, read: Callable[[], object]
) -> list[Row]:
    """Every layer has weights of its own, so that no weight is still in a cache when its turn comes."""
    ours, made = ops["aten::linear"], []
    totals = {"ours": [0.0] * rounds, "torch": [0.0] * rounds}
    for name, (num_out, num_in) in {**LINEAR, "head": HEAD_SHAPE}.items():
        copies = 1 if name == "head" else LAYERS
        weights = [(torch.randn(num_out, num_in) / num_in**0.5).to(dtype) for _ in range(copies)]
        x = torch.randn(rows, num_in).to(dtype)
        seconds = race(
            {
                "ours": lambda: [ours(x, weight) for weight in weights],  # noqa: B023  # called before the next turn
                "torch": lambda: [F.linear(x, weight) for weight in weights],  # noqa: B023
                "read": read,
            },
            rounds,
        )
        num_bytes = copies * num_out * num_in * dtype.itemsize
        speeds = {key: [num_bytes / 1e9 / took for took in seconds[key]] for key in ("ours", "torch")}
        read_speed = statistics.median(PROBE_BYTES / 1e9 / took for took in seconds["read"])
        metric = f"cpu_linear_{name}_m{rows}_{NAMES[dtype]}"
        made.append(
            Row.of(f"{metric}_gb_s", speeds["ours"], "GB/s", statistics.median(speeds["torch"]), "F.linear")
        )
        share = [speed / read_speed for speed in speeds["ours"]]
        made.append(
            Row.of(f"{metric}_of_read", share, "share", None, f"of {read_speed:.1f} GB/s, a plain read loop")
        )
        for key, total in totals.items():
            totals[key] = [a + b for a, b in zip(total, seconds[key], strict=True)]
    baseline = statistics.median(totals["torch"]) * 1e3
    samples = [total * 1e3 for total in totals["ours"]]
    made.append(Row.of(f"cpu_linears_m{rows}_{NAMES[dtype]}_ms", samples, "ms", baseline, "F.linear"))
    return made


def other_calls(dtype: torch.dtype, sequences: int, context: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of one decode step's ops; the last case is the attention of a prefill."""
    hidden, weight = torch.randn(1, sequences, WIDTH).to(dtype), torch.ones(WIDTH).to(dtype)
    gate, up = torch.randn(1, sequences, 2 * FEED_FORWARD).to(dtype).chunk(2, -1)
    qkv = torch.randn(sequences, (HEADS + 2 * KV_HEADS) * HEAD).to(dtype)
    q, k, v = qkv.unflatten(1, (-1, HEAD)).split([HEADS, KV_HEADS, KV_HEADS], 1)
    blocks = sequences * -(-context // BLOCK)
    caches = [torch.randn(blocks, BLOCK, KV_HEADS, HEAD).to(dtype) for _ in range(2)]
    tables = torch.randperm(blocks).int().view(sequences, -1)
    table = torch.randn(sequences, HEAD).to(dtype)
    slots = tables[:, -1].long() * BLOCK
    lengths, starts = torch.full((sequences,), context).int(), torch.arange(sequences + 1).int()
    prompt = torch.randn(context, HEADS, HEAD).to(dtype)
    one = tables[:1], lengths[:1], torch.tensor([0, context]).int()
    return {
        "rms_norm": (hidden, weight, 1e-5, 0.0, True),
        "add_rms_norm": (hidden, hidden, weight, 1e-5, 0.0, True),
        "silu_mul": (gate, up),
        "gelu_tanh_mul": (gate, up),
        "kv_write": (k, v, *caches, slots),
        "rope_kv_write": (q, k, v, table, table, *caches, slots, None, None, 1e-5, 0.0, True, False),
        f"paged_attention_{context}": (q, *caches, tables, lengths, starts, HEAD**-0.5, 0, 0.0),
        f"paged_attention_prefill_{context}": (prompt, *caches, *one, HEAD**-0.5, 0, 0.0),
    }


def other_rows(ops: Ops, dtype: torch.dtype, sequences: int, rounds: int) -> list[Row]:
    made = []
    for name, args in other_calls(dtype, sequences, 512).items():
        if "prefill" in name and sequences > 1:
            continue
        op = name.split("_prefill")[0].rstrip("_0123456789")
        repeats = 1 if "prefill" in name else 100 // sequences
        ours, theirs = ops[f"ostinato::{op}"], getattr(torch.ops.ostinato, op)
        seconds = race(
            {
                "ours": lambda: [ours(*args) for _ in range(repeats)],  # noqa: B023
                "torch": lambda: [theirs(*args) for _ in range(repeats)],  # noqa: B023
            },
            rounds,
        )
        per_call = {key: [took / repeats * 1e6 for took in seconds[key]] for key in seconds}
        metric = f"cpu_{name}_b{sequences}_{NAMES[dtype]}_us"
        made.append(
            Row.of(metric, per_call["ours"], "us", statistics.median(per_call["torch"]), "torch reference")
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "kernels.so"
        build_seconds = native.build(path).seconds
        library = native.load(path)
        ops, read = native.bind(library), build_read_loop(Path(folder))
        made = [Row.of("cpu_kernels_build_s", [build_seconds], "s", None, "none")]
        plan = plan_threads(CpuConfig(threads=arguments.threads))
        with bound_threads(plan, start_team=library.start_team):
            for dtype in NAMES:
                for rows in arguments.rows:
                    made += linear_rows(ops, dtype, rows, arguments.rounds, read)
                for sequences in (1, 8):
                    made += other_rows(ops, dtype, sequences, arguments.rounds)
            write_record("cpu_ops", made)


if __name__ == "__main__":
    main()
