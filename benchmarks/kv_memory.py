"""What growing and shrinking KV memory costs on this host, for the demo model's shape: 30 layers, 60 planes.

    python -m benchmarks.kv_memory

Rows: milliseconds of one step of growth (4, 16 and 64 MiB over all planes), and per MiB of the first touch
and of giving back. The baseline is a torch allocation of the same bytes, which cannot grow in place.
"""

from __future__ import annotations

import time

import torch

from benchmarks.record import Row, write_record
from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm_host import HostVmm

LAYERS = [KVLayer(kv_heads=3, k_size=64, v_size=64)] * 30
BLOCK, STEPS = 16, 20
PLAIN = "torch.empty, then add_"


def ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def measure(step_mib: int) -> list[Row]:
    """One pool grown by STEPS steps, written, and shrunk to its first blocks."""
    pool = KVPool(LAYERS, torch.float32, BLOCK, 30_000, HostVmm(), step_bytes=step_mib << 20)
    pool.commit(1)
    start_bytes, grown = pool.physical_bytes, []
    for _ in range(STEPS):
        began = time.perf_counter()
        pool.commit(pool.committed_blocks + pool.grow_step)
        grown.append(ms_since(began))
    full_mib = (pool.physical_bytes - start_bytes) / 2**20
    began = time.perf_counter()
    torch._foreach_add_(pool.narrowed(), 1.0)
    touched = ms_since(began) / full_mib
    began, held = time.perf_counter(), pool.physical_bytes
    pool.shrink(1)
    given_back = ms_since(began) / ((held - pool.physical_bytes) / 2**20)
    pool.close()

    began = time.perf_counter()
    plain = torch.empty(int(full_mib) << 18)
    allocated = ms_since(began) / full_mib
    began = time.perf_counter()
    plain.add_(1.0)
    written = ms_since(began) / full_mib
    return [
        Row.of(f"kv_grow_{step_mib}mib_ms", grown, "ms", allocated * full_mib / STEPS, PLAIN),
        Row.of(f"kv_first_touch_ms_per_mib_step_{step_mib}mib", [touched], "ms/MiB", written, PLAIN),
        Row.of(f"kv_give_back_ms_per_mib_step_{step_mib}mib", [given_back], "ms/MiB", None, "none"),
    ]


def main() -> None:
    measure(16)  # warm up
    write_record("kv_memory", [row for step_mib in (4, 16, 64) for row in measure(step_mib)])


if __name__ == "__main__":
    main()
