"""`KVPool`: the KV planes of all layers, with the same blocks committed, growing and shrinking in place.

Shapes: a plane is [capacity_blocks, block_tokens, kv_heads, size]. Its tensor spans the reserved capacity and
never moves; only blocks below `committed_blocks` may be touched. Where planes lie is `kv_layout`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ostinato.errors import ConfigError
from ostinato.graph.facts import KVLayer
from ostinato.runtime.config import KVConfig
from ostinato.runtime.memory.elastic_buffer import ElasticBuffer
from ostinato.runtime.memory.kv_layout import Arrangement, PlanePlace, plan_layout
from ostinato.runtime.memory.memory_limits import Limits
from ostinato.runtime.memory.vmm import MemoryRegistered, VmmDriver, VmmError, VmmOutOfMemory

log = logging.getLogger(__name__)

DEFAULT_STEP_BYTES = 16 << 20
"""Bytes of one step of growth, all planes together: 6 ms on the host machine of docs/memory.md."""

_MAX_BLOCKS = (1 << 31) - 1  # block tables are int32


def plan_capacity(
    kv: KVConfig, block_bytes: int, limits: Limits, *, min_blocks: int = 1, is_elastic: bool = True
) -> tuple[int, int]:
    """(blocks to commit at start, blocks to reserve addresses for).

    Addresses cost nothing: the capacity is what `kv.max_gib` allows, or all memory less the headroom; growth
    stops earlier when memory is not really free. Without elastic memory both numbers are the same.
    Raises `ConfigError` if `min_blocks` (what the engine cannot work without) do not fit.
    """
    state = limits.read()
    ceiling = max(0, state.total_bytes - limits.headroom_bytes)
    if kv.max_gib:
        ceiling = min(ceiling, int(kv.max_gib * (1 << 30)))
    capacity = min(ceiling // block_bytes, _MAX_BLOCKS)
    free = min(limits.available() // block_bytes, capacity)
    if free < min_blocks:
        raise ConfigError(
            f"KV memory: {min_blocks} blocks of {block_bytes} B ({min_blocks * block_bytes / 2**20:.1f} MiB) "
            f"are needed, {free} may be taken ({state.free_bytes >> 20} MiB free by {state.source}, "
            f"headroom {limits.headroom_bytes >> 20} MiB, kv.max_gib={kv.max_gib:g}); free memory, lower "
            "kv.headroom_gib or max_model_len, or raise kv.max_gib"
        )
    initial = min(max(-(-(kv.initial_mib << 20) // block_bytes), min_blocks), free)
    return initial, capacity if is_elastic else initial


class KVPool:
    """KV planes of all layers over elastic memory.

    One thread (the engine loop, between steps) calls `commit`, `shrink` and the other verbs; nothing here is
    locked. The tensors may be read and written from any thread, in committed blocks. Numbers
    (`committed_blocks`, `physical_bytes`) may be read from any thread and are right between two calls.
    Tensors keep the memory alive: after `close` it is freed when the last plane or view is gone, and so using
    one of them late is never a fault.
    """

    def __init__(
        self,
        kv_layers: Sequence[KVLayer],
        dtype: torch.dtype,
        block_tokens: int,
        capacity_blocks: int,
        driver: VmmDriver,
        *,
        limits: Limits | None = None,
        step_bytes: int = DEFAULT_STEP_BYTES,
        arrangement: Arrangement = "split",
    ) -> None:
        """Reserve addresses; nothing is committed. Without `limits` growth ends only at the capacity."""
        if not kv_layers:
            raise ValueError("kv_layers: empty; a model without KV needs no pool")
        if not 0 < capacity_blocks <= _MAX_BLOCKS:
            raise ValueError(f"capacity_blocks={capacity_blocks}: must be 1 to {_MAX_BLOCKS}")
        if block_tokens < 1 or step_bytes < 1:
            raise ValueError(f"block_tokens={block_tokens}, step_bytes={step_bytes}: must be at least 1")
        self.driver = driver
        self.capacity_blocks = capacity_blocks
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * sum(layer.token_bytes(dtype.itemsize) for layer in kv_layers)
        self.grow_step = max(1, step_bytes // self.block_bytes)
        self._dtype = dtype
        self._limits = limits
        self._committed = 0
        self._is_released = False
        self._stopped_by: str | None = None
        self._registered: set[str] = set()
        layout = plan_layout(kv_layers, dtype.itemsize, block_tokens, arrangement)
        self._places = layout.planes
        self._buffers = [self._buffer(plan.segments, plan.block_bytes) for plan in layout.buffers]
        self._planes = [
            self._shaped(self._buffers[p.buffer].buffer.segment(p.segment), p, capacity_blocks)
            for p in self._places
        ]

    @property
    def committed_blocks(self) -> int:
        """Blocks that may be touched: 0 to this number, exclusive."""
        return 0 if self._is_released else self._committed

    @property
    def physical_bytes(self) -> int:
        """Bytes that are really held, rounding to granules and memory not given back yet included."""
        return sum(sized.buffer.physical_bytes for sized in self._buffers)

    @property
    def stopped_by(self) -> str | None:
        """Why the last `commit` gave fewer blocks than asked; None if it did not."""
        return self._stopped_by

    @property
    def is_released(self) -> bool:
        """True between `release_physical` and `recommit`."""
        return self._is_released

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self._buffers

    def planes(self) -> list[torch.Tensor]:
        """k0, v0, k1, v1, ... each [capacity_blocks, block_tokens, kv_heads, size]."""
        self._check_open("planes")
        return list(self._planes)

    def narrowed(self) -> list[torch.Tensor]:
        """The planes cut to the committed blocks: same address and strides, and the storage ends there too.

        Such a view does not follow later growth, and must not be used for blocks that were shrunk away since:
        who hands them on calls `register`.
        """
        self._check_usable("narrowed")
        return [
            self._shaped(self._buffers[p.buffer].buffer.narrowed(p.segment), p, self._committed)
            for p in self._places
        ]

    def register(self, who: str) -> list[torch.Tensor]:
        """The narrowed planes, for a connector that registers them elsewhere, until `unregister(who)`.

        Meanwhile memory may grow but none is taken away: the verbs that would raise `MemoryRegistered`.
        """
        views = self.narrowed()
        self._registered.add(who)
        return views

    def unregister(self, who: str) -> None:
        """The connector has let go of the memory."""
        self._registered.discard(who)

    @property
    def registered_by(self) -> tuple[str, ...]:
        """Names of the connectors that hold the memory."""
        return tuple(sorted(self._registered))

    def commit(self, num_blocks: int, *, defragment: bool = False) -> int:
        """Make blocks 0 to `num_blocks` usable, new ones zeroed; return `committed_blocks`.

        The result is more than asked where granules hold more anyway, and less at the capacity or where
        memory less the headroom does not allow it (`stopped_by` tells); nothing is raised then. Never takes
        blocks away. Goes in steps of `grow_step` blocks, each of them for all layers or for none; to keep a
        decode step short, ask for `committed_blocks + grow_step`.
        With `defragment` all blocks, old ones too, lose their content and read zero: see `defragment`.
        Raises `VmmError` if the driver fails for another reason than lack of memory; what earlier steps gave
        stays.
        """
        self._check_usable("commit")
        if defragment:
            self._check_unregistered("commit with defragment")
        if num_blocks < 0:
            raise ValueError(f"commit({num_blocks}): must not be negative")
        target = min(num_blocks, self.capacity_blocks)
        refusal = (
            None if target == num_blocks else f"the capacity of {self.capacity_blocks} blocks is reached"
        )
        while self._committed < target:
            blocks = self._rounded(min(target, self._committed + self.grow_step))
            refusal_now = self._refusal(blocks)
            if refusal_now is None:
                try:
                    self._grow_all(blocks)
                except VmmOutOfMemory as error:
                    refusal_now = str(error)
            if refusal_now is not None:
                refusal = refusal_now
                break
        self._stopped_by = refusal
        if defragment:
            self.defragment()
        return self._committed

    def handles_of_step(self) -> dict[int, int]:
        """Bytes of a handle -> how many of them one step of growth takes."""
        wanted: dict[int, int] = {}
        for buffer, _ in self._buffers:
            wanted[buffer.extent_bytes] = wanted.get(buffer.extent_bytes, 0) + buffer.segments
        return wanted

    def shrink(self, num_blocks: int) -> int:
        """Keep blocks 0 to `num_blocks` and give memory behind them back; return `committed_blocks`.

        Does nothing if no more are committed. The caller has made sure that nothing uses the blocks behind;
        the driver waits for work in flight. If the driver fails in a layer, all others are shrunk and
        `VmmError` is raised: the blocks are gone for everybody, the memory counts in `physical_bytes`, a
        second call tries again.
        """
        self._check_usable("shrink")
        if num_blocks < 0:
            raise ValueError(f"shrink({num_blocks}): must not be negative")
        self._check_unregistered("shrink")
        self._committed = min(self._committed, num_blocks)
        failure = None
        for buffer, bytes_per_block in self._buffers:
            try:
                buffer.shrink(min(buffer.committed_bytes, self._committed * bytes_per_block))
            except VmmError as error:
                failure = error
        if failure is not None:
            raise failure
        return self._committed

    def release_physical(self) -> None:
        """Give all memory back but keep addresses and planes; content is lost and nothing may be touched.

        If the driver fails in a layer, all others are released and `VmmError` is raised; a second call tries
        again.
        """
        self._check_open("release_physical")
        self._check_unregistered("release_physical")
        self._is_released = True
        failure = None
        for buffer, _ in self._buffers:
            try:
                buffer.release_physical()
            except VmmError as error:
                failure = error
        if failure is not None:
            raise failure

    def recommit(self) -> int:
        """Undo `release_physical`; blocks read zero. On `VmmError` the pool stays released."""
        self._check_open("recommit")
        if not self._is_released:
            raise ValueError("recommit: nothing was released; call release_physical first")
        self.release_physical()  # a layer that an earlier failure left behind
        try:
            for buffer, bytes_per_block in self._buffers:
                buffer.recommit()
                buffer.grow(max(buffer.committed_bytes, self._committed * bytes_per_block), zero_new=True)
        except VmmError:
            self._release_again()
            raise
        self._is_released = False
        return self._committed

    def defragment(self) -> None:
        """Back each plane by one handle, for those who register memory; content is lost and reads zero.

        All or nothing: on `VmmError` the pool is released, and `recommit` may still succeed with small
        handles.
        """
        self._check_usable("defragment")
        self._check_unregistered("defragment")
        try:
            for buffer, _ in self._buffers:
                buffer.defragment()
        except VmmError:
            self._release_again()
            raise

    def check(self) -> None:
        """Raise `VmmError` if the books of any layer contradict themselves, the driver's, or the pool's."""
        for buffer, bytes_per_block in self._buffers:
            buffer.check()
            if not self._is_released and buffer.committed_bytes < self._committed * bytes_per_block:
                raise VmmError(
                    f"a layer has {buffer.committed_bytes} bytes, {self._committed} blocks need more"
                )
            if self._is_released != buffer.is_released:
                raise VmmError("a layer is not released like the others")

    def close(self) -> bool:
        """Let go of all memory; repeated calls do no harm. False: tensors outside still hold some of it."""
        if self.is_closed:
            return True
        buffers = [sized.buffer for sized in self._buffers]
        self._planes, self._places, self._buffers = [], (), []
        self._committed = 0
        held = [buffer for buffer in buffers if not buffer.close()]
        if held:
            kept = sum(buffer.physical_bytes for buffer in held)
            log.warning(
                "KV pool closed, but tensors still hold %.1f MiB; drop the planes to free it", kept / 2**20
            )
        return not held

    def _buffer(self, segments: int, bytes_per_block: int) -> _Sized:
        granule = self.driver.granularity
        capacity = (
            -(-self.capacity_blocks * bytes_per_block // granule) * granule
        )  # planes start at a granule
        extent = -(-min(self.grow_step, self.capacity_blocks) * bytes_per_block // granule) * granule
        return _Sized(ElasticBuffer(self.driver, segments, capacity, extent_bytes=extent), bytes_per_block)

    def _shaped(self, flat: torch.Tensor, place: PlanePlace, blocks: int) -> torch.Tensor:
        bytes_per_block = self._buffers[place.buffer].bytes_per_block
        itemsize = self._dtype.itemsize
        rows = flat[: blocks * bytes_per_block].view(self._dtype).view(blocks, bytes_per_block // itemsize)
        first, size = place.offset // itemsize, self.block_tokens * place.tail[0] * place.tail[1]
        return rows[:, first : first + size].view(blocks, self.block_tokens, *place.tail)

    def _rounded(self, blocks: int) -> int:
        """The most blocks that take no more granules than `blocks` do."""
        granule = self.driver.granularity
        sizes = {sized.bytes_per_block for sized in self._buffers}
        return min(self.capacity_blocks, *(-(-blocks * n // granule) * granule // n for n in sizes))

    def _refusal(self, blocks: int) -> str | None:
        if self._limits is None or not self.driver.is_elastic:
            return None
        need = sum(buffer.bytes_to_grow(blocks * n) for buffer, n in self._buffers)
        if not need or need <= (available := self._limits.available()):
            return None
        return f"{need} bytes needed, {available} may be taken (headroom {self._limits.headroom_bytes} bytes)"

    def _grow_all(self, blocks: int) -> None:
        grown: list[tuple[ElasticBuffer, int]] = []
        try:
            for buffer, bytes_per_block in self._buffers:
                before = buffer.committed_bytes
                buffer.grow(max(before, blocks * bytes_per_block), zero_new=True)
                grown.append((buffer, before))
        except VmmError:
            for buffer, before in grown:
                try:
                    buffer.shrink(before)
                except (
                    VmmError
                ) as error:  # the layer stays larger than the others; the next commit or shrink uses it
                    log.warning("KV memory: a layer could not be made small again: %s", error)
            raise
        self._committed = blocks

    def _release_again(self) -> None:
        try:
            self.release_physical()
        except VmmError as error:
            log.warning("KV memory: a layer could not be released: %s", error)

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise ValueError(f"{what}: the pool is closed; make a new one")

    def _check_unregistered(self, what: str) -> None:
        if self._registered:
            raise MemoryRegistered(
                f"{what}: {', '.join(self.registered_by)} has registered the memory; unregister it there"
            )

    def _check_usable(self, what: str) -> None:
        self._check_open(what)
        if self._is_released:
            raise ValueError(f"{what}: physical memory is released; call recommit first")


class _Sized(NamedTuple):
    buffer: ElasticBuffer
    bytes_per_block: int  # in each segment
