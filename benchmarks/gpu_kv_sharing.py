"""Two processes on one GPU that pass KV memory back and forth under alternating load.

    python -m benchmarks.gpu_kv_sharing

Both may take SHARED_GIB together, and each in its turn wants LOAD_GIB of it, which the other has just ceased
to use. `kv_handover_s` is the time from wanting to having; a turn that does not get its memory fails the run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.record import Row, write_record
from ostinato.graph.facts import KVLayer
from ostinato.runtime.kv_memory import DEVICE_STEP_BYTES
from ostinato.runtime.kv_sizer import KVSizer
from ostinato.runtime.memory.device_limits import DeviceLimits
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.memory_peers import MemoryPeers
from ostinato.runtime.memory.vmm_cuda import CudaVmm
from ostinato.runtime.scheduling.block_pool import BlockPool

GIB = 1 << 30
SHARED_GIB, LOAD_GIB = 24, 18
LAYERS = [KVLayer(kv_heads=8, k_size=128, v_size=128)] * 32
TURNS = 6  # of each process
LIMIT_S = 5.0
STEP_S = 0.002  # between two steps of the engine that is imitated


class Engine:
    """The memory of an engine, and steps that only ask for it."""

    def __init__(self, folder: Path) -> None:
        driver = CudaVmm("cuda:0")
        spare = HandlePool(driver)
        headroom = driver.memory().free - SHARED_GIB * GIB

        def memory() -> tuple[int, int]:
            free, total = driver.memory()
            return free + spare.spare_bytes, total

        limits = DeviceLimits(memory, headroom)
        block_bytes = sum(layer.token_bytes(2) for layer in LAYERS) * 16
        capacity = SHARED_GIB * GIB // block_bytes
        pool = KVPool(
            LAYERS, torch.bfloat16, 16, capacity, spare, limits=limits, step_bytes=DEVICE_STEP_BYTES
        )
        self.blocks = BlockPool(pool.commit(GIB // 4 // block_bytes), capacity, 16, prefix_cache=True)
        self.sizer = KVSizer(
            KVWorker(pool, is_threaded=True, spare=spare, limits=limits),
            self.blocks,
            patience_s=LIMIT_S,
            peers=MemoryPeers(folder),
        )
        self.load = LOAD_GIB * GIB // block_bytes
        self.held: list[int] = []

    def take(self) -> float:
        """Hold the load; seconds until it was there."""
        began = time.perf_counter()
        while len(self.held) < self.load:
            self.step(self.load - len(self.held))
            self.held += self.blocks.allocate(min(self.load - len(self.held), self.blocks.available))
            if time.perf_counter() - began > LIMIT_S:
                raise SystemExit(f"{len(self.held)} of {self.load} blocks after {LIMIT_S} s")
        self.step(0)
        return time.perf_counter() - began

    def rest(self) -> None:
        """Requests have ended: nothing is held any more."""
        self.blocks.free(self.held)
        self.held = []

    def step(self, lacking: int) -> None:
        """What the engine does with its memory in one step."""
        self.sizer.grow(max(0, lacking - self.blocks.num_free))
        if self.sizer.wants_quiet:
            self.sizer.cut(self._move)
        time.sleep(STEP_S)

    def idle_until(self, turn: Path) -> None:
        """Steps without load until a file is there."""
        while not turn.exists():
            self.step(0)

    def _move(self, moves: object) -> None:
        raise SystemExit("nothing is held when memory goes back")


def turns(folder: Path, mine: str, other: str, *, begins: bool) -> list[float]:
    """Take turns with the other process, by files."""
    engine, samples = Engine(folder), []
    (folder / f"{mine}-ready").touch()
    engine.idle_until(folder / f"{other}-ready")
    for turn in range(TURNS):
        if not begins or turn:
            engine.idle_until(folder / f"{other}-{turn - begins}")
        samples.append(engine.take())
        engine.rest()
        (folder / f"{mine}-{turn}").touch()
    engine.idle_until(folder / f"{other}-{TURNS - 1}")
    engine.sizer.check()
    engine.sizer.close()
    return samples


def main() -> None:
    if len(sys.argv) == 2:
        turns(Path(sys.argv[1]), "b", "a", begins=False)
        return
    with tempfile.TemporaryDirectory() as name:
        child = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_kv_sharing", name])
        try:
            samples = turns(Path(name), "a", "b", begins=True)
            if child.wait(timeout=30):
                raise SystemExit("the second process failed")
        finally:
            child.kill()
    write_record("gpu_kv_sharing", [Row.of("kv_handover_s", samples[1:], "s", None, "none")])


if __name__ == "__main__":
    main()
