"""Small KV pools, and a file system that says how much memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm import VmmDriver

EQUAL = KVLayer(kv_heads=2, k_size=8, v_size=8)  # 4 tokens of float32: 256 bytes a block and plane
UNEQUAL = KVLayer(kv_heads=1, k_size=16, v_size=4)  # 256 and 64 bytes


def small_pool(
    driver: VmmDriver, layers: Sequence[KVLayer] = (EQUAL, UNEQUAL), capacity: int = 40, **named: object
) -> KVPool:
    """Blocks of 4 tokens, 832 bytes in all planes of the two layers."""
    return KVPool(layers, torch.float32, 4, capacity, driver, **named)


def free_memory(root: Path, free_mib: float, total_mib: int = 8192) -> None:
    """Make `root` a file system whose /proc says so."""
    (root / "proc").mkdir(exist_ok=True)
    text = f"MemTotal: {total_mib << 10} kB\nMemAvailable: {int(free_mib * 1024)} kB\n"
    (root / "proc/meminfo").write_text(text)
