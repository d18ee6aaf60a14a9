"""KV block ids: who holds them, and which hold a prefix that another request may reuse. No memory, no torch.

A committed block is in exactly one state:
    free    nobody refers to it and its content is worthless
    held    at least one sequence refers to it (it may be matchable too)
    cached  nobody refers to it, but it holds a known prefix; the least recently used goes first
so free + held + cached = committed, always (`check`).

A block becomes matchable by `publish`, which the scheduler calls after the step that wrote the block's last
token has finished; hence a match never finds half-written content. The key of a block is a 256-bit hash
chained over its parent's key and its own token ids, starting from the cache salt. Two different prefixes
with one key are out of reach (2**128 work), so the content is not compared again.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from ostinato.errors import OutOfBlocks


class PrefixKeys:
    """Keys of the full blocks of one sequence, made when asked for and kept, as tokens are only appended."""

    __slots__ = ("_block_tokens", "_keys", "_root", "_tokens")

    def __init__(self, tokens: Sequence[int], block_tokens: int, salt: str) -> None:
        """`tokens` is referred to, not copied; it may grow at the end but not change. Ids fit into int64."""
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._root = blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"ostinato-salt"
        ).digest()
        self._keys: list[bytes] = []

    def __getitem__(self, index: int) -> bytes:
        """Key of block `index`, all of whose tokens must be there."""
        keys, size = self._keys, self._block_tokens
        while len(keys) <= index:
            at = len(keys) * size
            ids = array("q", self._tokens[at : at + size])
            assert len(ids) == size, f"block {len(keys)} has {len(ids)} of {size} tokens"
            keys.append(blake2b(ids.tobytes(), digest_size=32, key=keys[-1] if keys else self._root).digest())
        return keys[index]


class BlockPool:
    """Blocks 0 to `committed` - 1 can be used now; up to `capacity` after growth."""

    def __init__(self, committed: int, capacity: int, block_tokens: int, prefix_cache: bool) -> None:
        if not 0 <= committed <= capacity:
            raise ValueError(f"committed={committed}: must be between 0 and capacity={capacity}")
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens}: must be at least 1")
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self._refs = [0] * committed
        self._key_of: list[bytes | None] = [None] * committed
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(committed))  # a heap: low ids first, so that the tail can be given back
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evictions = 0

    @property
    def committed(self) -> int:
        """Blocks that have memory."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content is kept for the prefix cache."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that sequences refer to."""
        return len(self._refs) - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give: free and cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._refs[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """New blocks with one holder each: free ones first, then the least recently used cached ones.

        All or nothing: raises OutOfBlocks when fewer than `num_blocks` are available.
        """
        if num_blocks > self.available:
            raise OutOfBlocks(
                f"{num_blocks} KV blocks wanted, {self.available} of {self.committed} committed available"
            )
        blocks = [self._take() for _ in range(num_blocks)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, block_ids: Sequence[int]) -> None:
        """One more holder for each of these matched blocks (held or cached)."""
        for block in block_ids:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block of a sequence, given in sequence order.

        The last block is let go first: a prefix loses its tail before its head.
        """
        for block in reversed(block_ids):
            assert self._refs[block] > 0, f"block {block} is freed but nobody holds it"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key_of[block] is None:
                    heapq.heappush(self._free, block)
                else:
                    self._cached[block] = None

    def publish(self, block_id: int, key: bytes) -> None:
        """The KV of a held block is complete on the device: it can be matched under `key` from now on.

        Where another block already has this key, that one stays and this one remains private.
        """
        assert self._refs[block_id] > 0, f"block {block_id} is published but nobody holds it"
        if self.prefix_cache and key not in self._block_of and self._key_of[block_id] is None:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def lookup(self, key: bytes) -> int | None:
        """The block published under this key, if any. Take it with `hold` before anything else happens."""
        return self._block_of.get(key)

    def forget_prefixes(self) -> int:
        """No block can be matched any more: cached ones are free, held ones private; how many could."""
        known = len(self._block_of)
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of.clear()
        for block in self._cached:
            heapq.heappush(self._free, block)
        self._cached.clear()
        return known

    def grow_to(self, num_blocks: int) -> None:
        """Blocks up to `num_blocks` have memory now. A smaller number than `committed` is an error."""
        if not self.committed <= num_blocks <= self.capacity:
            raise ValueError(f"grow_to({num_blocks}): must be between {self.committed} and {self.capacity}")
        self._free.extend(range(self.committed, num_blocks))  # all above the heap's ids: it stays a heap
        added = num_blocks - self.committed
        self._refs.extend([0] * added)
        self._key_of.extend([None] * added)

    def shrink_tail(self, keep: int = 0) -> int:
        """Forget unreferenced blocks at the tail, cached ones too; return how many.

        At least `keep` blocks stay. The caller unmaps after this and takes back with `grow_to` what it could
        not unmap.
        """
        old = size = self.committed
        while size > keep and self._refs[size - 1] == 0:
            size -= 1
            if self._key_of[size] is not None:
                del self._cached[size]
                self._forget(size)
        if size < old:
            del self._refs[size:], self._key_of[size:]
            self._free = [block for block in self._free if block < size]
            heapq.heapify(self._free)
        return old - size

    def plan_moves(self, keep: int) -> list[tuple[int, int]]:
        """Moves (from, to) that leave only free blocks from `keep` on. `keep` is at least `num_held`.

        Cached blocks that find no room below `keep` are evicted, least recently used first; the others move
        too and keep their keys. The caller copies the content and calls `move`. Cost: linear in `committed`.
        """
        if keep < self.num_held:
            raise ValueError(f"plan_moves({keep}): {self.num_held} blocks are held; keep at least these")
        while self._cached and self.num_held + len(self._cached) > keep:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.evictions += 1
            heapq.heappush(self._free, block)
        free = set(self._free)
        sources = [block for block in range(keep, self.committed) if block not in free]
        return list(zip(sources, sorted(self._free)[: len(sources)], strict=True))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """The content of each block `from` lies in the free block `to` now: holders and key go with it."""
        place = dict(moves)
        self._cached = OrderedDict.fromkeys(place.get(block, block) for block in self._cached)
        for source, target in moves:
            self._refs[target], self._refs[source] = self._refs[source], 0
            key = self._key_of[target] = self._key_of[source]
            self._key_of[source] = None
            if key is not None:
                self._block_of[key] = target
        targets = set(place.values())
        self._free = [*(block for block in self._free if block not in targets), *place]
        heapq.heapify(self._free)

    def check(self) -> None:
        """Raise AssertionError when the books do not balance. Cost: linear in `committed`."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(held) == self.committed, "free + held + cached != committed"
        assert free | cached | held == set(range(self.committed)), "a block is in two states or in none"
        assert all(refs >= 0 for refs in self._refs), "a block has fewer than no holders"
        assert all(self._key_of[block] is None for block in free), "a free block can be matched"
        assert all(self._key_of[block] is not None for block in cached), "a cached block cannot be matched"
        keys = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert keys == self._block_of, "keys and blocks disagree"
        assert self.committed <= self.capacity, "more committed than there is room for"

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self.evictions += 1
        return block

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
