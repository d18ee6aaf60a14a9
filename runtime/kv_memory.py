"""The KV memory of an engine, put together: driver, limits, pool, worker, block ids, sizer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ostinato.errors import ConfigError
from ostinato.graph.facts import ModelFacts
from ostinato.runtime.config import KVConfig
from ostinato.runtime.kv_sizer import KVSizer
from ostinato.runtime.memory.device_limits import DeviceLimits
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import DEFAULT_STEP_BYTES, KVPool, plan_capacity
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.memory_limits import Limits, MemoryLimits
from ostinato.runtime.memory.memory_peers import MemoryPeers, peers_folder
from ostinato.runtime.memory.vmm import VmmDriver
from ostinato.runtime.memory.vmm_cuda import CudaVmm
from ostinato.runtime.memory.vmm_host import HostVmm
from ostinato.runtime.memory.vmm_plain import usable_driver
from ostinato.runtime.scheduling.block_pool import BlockPool

log = logging.getLogger(__name__)

DEVICE_STEP_BYTES = 256 << 20
"""Bytes of one step of growth on a GPU, all planes together; a granule is 2 MiB, and there are 64 planes."""


class KVMemory(NamedTuple):
    """What the engine holds. `sizer.close()` frees the memory once the planes are let go."""

    pool: KVPool  # for its planes and numbers; its size is the sizer's business
    blocks: BlockPool
    sizer: KVSizer


def make_kv_memory(
    facts: ModelFacts,
    kv: KVConfig,
    device: torch.device,
    *,
    stream: int | None = None,
    wake: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> KVMemory:
    """Reserve KV addresses on `device` and commit what `kv.initial_mib` says.

    `stream`: the CUDA stream of the steps (`torch.cuda.Stream.cuda_stream`); memory is taken away behind its
    work only. `wake` is called from another thread when the engine should take a turn although it rests.
    Raises ConfigError if there is no room.
    """
    dtype = getattr(torch, facts.dtype)
    driver, limits, spare = _driver(device, int(kv.headroom_gib * (1 << 30)), stream)
    block_bytes = facts.kv_token_bytes(dtype.itemsize) * kv.block_tokens
    initial, capacity = plan_capacity(kv, block_bytes, limits, is_elastic=driver.is_elastic)
    is_cuda = device.type == "cuda"
    pool = KVPool(
        facts.kv_layers,
        dtype,
        kv.block_tokens,
        capacity,
        driver,
        limits=limits,
        step_bytes=DEVICE_STEP_BYTES if is_cuda else DEFAULT_STEP_BYTES,
    )
    committed = pool.commit(initial)
    if committed == 0:
        raise ConfigError(f"KV memory: not one block could be committed: {pool.stopped_by}")
    log.info(
        "KV memory: %d blocks of %d tokens (%d MiB), up to %d blocks (%d MiB), by %s",
        committed,
        kv.block_tokens,
        pool.physical_bytes >> 20,
        capacity,
        capacity * block_bytes >> 20,
        driver.name,
    )
    blocks = BlockPool(committed, capacity, kv.block_tokens, kv.prefix_cache)
    peers = MemoryPeers(peers_folder(_device_name(device)), wake=wake) if kv.share else None
    low = (pool.grow_step if is_cuda else 0) if kv.ahead_mib < 0 else -(-(kv.ahead_mib << 20) // block_bytes)
    sizer = KVSizer(
        KVWorker(pool, is_threaded=is_cuda and driver.is_elastic, spare=spare, limits=limits),
        blocks,
        low=low,
        high=2 * low,
        idle_s=kv.idle_shrink_s,
        patience_s=kv.wait_s,
        peers=peers,
        clock=clock,
    )
    return KVMemory(pool, blocks, sizer)


def _driver(
    device: torch.device, headroom_bytes: int, stream: int | None
) -> tuple[VmmDriver, Limits, HandlePool | None]:
    if device.type != "cuda":
        return usable_driver(HostVmm()), MemoryLimits(headroom_bytes), None
    cuda = CudaVmm(device)
    driver = usable_driver(cuda)
    if driver is not cuda:
        return driver, DeviceLimits(lambda: torch.cuda.mem_get_info(device), headroom_bytes), None
    if stream is not None:
        cuda.order_after(stream)
    spare = HandlePool(cuda)

    def memory() -> tuple[int, int]:
        free, total = cuda.memory()
        return free + spare.spare_bytes, total

    return spare, DeviceLimits(memory, headroom_bytes), spare


def _device_name(device: torch.device) -> str:
    """What tells this device from others of the machine, in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
