"""Elastic KV memory on one GPU: driver calls, growth beside decode steps, idle shrink, moving blocks.

    python -m benchmarks.gpu_kv_memory

The pool has the shape of an 8B Llama (32 layers, 8 KV heads of 128, bf16). A step is a captured graph that
copies STEP_GIB, about what a decode step of that model moves; it is launched and waited for as an engine
does, while the pool grows on its own thread. The baseline of a step is the same loop without growth.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.record import Row, write_record
from ostinato.graph.facts import KVLayer
from ostinato.runtime.kv_memory import DEVICE_STEP_BYTES
from ostinato.runtime.memory.block_copy import copy_blocks
from ostinato.runtime.memory.device_limits import DeviceLimits
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.vmm_cuda import CudaVmm

MIB, GIB = 1 << 20, 1 << 30
LAYERS = [KVLayer(kv_heads=8, k_size=128, v_size=128)] * 32
BLOCK_TOKENS = 16
STEP_GIB = 16.0  # read and written: 4 ms at 4.3 TB/s
REPEATS = 7
NONE = "none"


def timed(call: Callable[[], object]) -> float:
    """Microseconds of wall time."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def driver_calls(driver: CudaVmm) -> list[Row]:
    """Every call that mapping memory takes, for four sizes."""
    rows = []
    for mib in (2, 32, 256, 2048):
        size = mib * MIB
        base = driver.reserve(size)
        samples: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            handles: list[int] = []
            calls: list[tuple[str, Callable[[], object]]] = [
                ("create", lambda handles=handles, size=size: handles.append(driver.create(size))),
                ("map", lambda base=base, handles=handles, size=size: driver.map(base, size, handles[0])),
                ("set_access", lambda base=base, size=size: driver.set_access(base, size)),
                ("zero", lambda base=base, size=size: driver.zero([(base, size)])),
                ("unmap", lambda base=base, size=size: driver.unmap(base, size)),
                ("release", lambda handles=handles: driver.release(handles[0])),
            ]
            for name, call in calls:
                samples.setdefault(name, []).append(timed(call))
        driver.free_reserved(base, size)
        rows += [Row.of(f"vmm_{name}_us_{mib}mib", us, "us", None, NONE) for name, us in samples.items()]
    return rows


def captured_step(
    source: torch.Tensor, target: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]:
    """A graph that moves STEP_GIB between two tensors of 256 MiB."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(int(STEP_GIB * GIB / (512 * MIB))):
            target.copy_(source)
    return graph, stream


def steps_ms(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, is_over: Callable[[int], bool]
) -> list[float]:
    """Wall time of each step until it is over."""
    done, times = torch.cuda.Event(), []
    with torch.cuda.stream(stream):
        while not is_over(len(times)):
            began = time.perf_counter()
            graph.replay()
            done.record()
            done.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    return times


def worker_over(driver: CudaVmm, capacity_bytes: int) -> KVWorker:
    """A pool as the engine makes it."""
    spare = HandlePool(driver)

    def memory() -> tuple[int, int]:
        free, total = driver.memory()
        return free + spare.spare_bytes, total

    limits = DeviceLimits(memory, GIB)
    block_bytes = sum(layer.token_bytes(2) for layer in LAYERS) * BLOCK_TOKENS
    pool = KVPool(
        LAYERS,
        torch.bfloat16,
        BLOCK_TOKENS,
        capacity_bytes // block_bytes,
        spare,
        limits=limits,
        step_bytes=DEVICE_STEP_BYTES,
    )
    return KVWorker(pool, is_threaded=True, spare=spare, limits=limits)


def growth(driver: CudaVmm) -> list[Row]:
    """2 GiB beside steps, three times; then far up, down again, and a compaction."""
    source, target = (torch.ones(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    graph, stream = captured_step(source, target)
    driver.order_after(stream.cuda_stream)
    worker = worker_over(driver, 64 * GIB)
    blocks_of = GIB // worker.pool.block_bytes
    worker.grow_to(blocks_of)
    worker.wait()
    worker.prepare()
    steps_ms(graph, stream, lambda n: n >= 20)
    quiet = steps_ms(graph, stream, lambda n: n >= 100)
    busy: list[float] = []
    took: list[float] = []
    for turn in range(3):
        goal = (1 + 2 * (turn + 1)) * blocks_of
        began = time.perf_counter()
        worker.grow_to(goal)
        while_growing = steps_ms(graph, stream, lambda n, goal=goal: n > 0 and worker.usable >= goal)
        took.append(time.perf_counter() - began)
        busy.append(max(while_growing))
    rows = [
        Row.of("kv_grow_2gib_worst_step_ms", busy, "ms", statistics.median(quiet), "median step, no growth"),
        Row.of(
            "kv_step_worst_quiet_ms", [max(quiet)], "ms", statistics.median(quiet), "median step, no growth"
        ),
        Row.of("kv_grow_2gib_s", took, "s", None, NONE),
    ]
    began = time.perf_counter()
    worker.grow_to(40 * blocks_of)
    worker.wait()
    rows.append(Row.of("kv_grow_gib_per_s", [33 / (time.perf_counter() - began)], "GiB/s", None, NONE))
    rows += [moved(worker, blocks_of), *given_back(driver, worker, blocks_of)]
    worker.close()
    return rows


def moved(worker: KVWorker, blocks: int) -> Row:
    """1 GiB of blocks to another place, as before a shrink."""
    planes = worker.pool.planes()
    pairs = [(4 * blocks - 1 - at, at) for at in range(blocks)]
    copy_blocks(planes, pairs[:64])
    torch.cuda.synchronize()
    samples = []
    for _ in range(3):
        began = time.perf_counter()
        copy_blocks(planes, pairs)
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - began) * 1e3)
    return Row.of("kv_move_1gib_ms", samples, "ms", 4 * GIB / 4.28e12 * 1e3, "two copies at 4.28 TB/s")


def given_back(driver: CudaVmm, worker: KVWorker, keep: int) -> list[Row]:
    """What an engine at rest returns to the device within two seconds, by the count of the driver."""
    torch.cuda.synchronize()
    unreferenced = worker.physical_bytes - keep * worker.pool.block_bytes
    free = driver.memory().free
    began = time.perf_counter()
    worker.shrink_to(keep)
    while worker.is_busy and time.perf_counter() - began < 2.0:
        time.sleep(0.005)
    fraction = (driver.memory().free - free) / unreferenced
    worker.wait()
    took = time.perf_counter() - began
    return [
        Row.of("kv_idle_shrink_fraction_2s", [fraction], "1", 0.95, "goal"),
        Row.of("kv_idle_shrink_s", [took], "s", 2.0, f"goal, {unreferenced / GIB:.0f} GiB"),
    ]


def main() -> None:
    driver = CudaVmm("cuda:0")
    reason = driver.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no elastic memory here: {reason}")
    driver.quiesce()
    driver_calls(driver)  # warm up
    gc.disable()  # a collection in a step would count as its time
    write_record("gpu_kv_memory", [*driver_calls(driver), *growth(driver)])


if __name__ == "__main__":
    main()
