"""Books, reference counts, prefix keys and eviction of the block pool."""

import random

import pytest

from ostinato.errors import OutOfBlocks
from ostinato.runtime.scheduling.block_pool import BlockPool, PrefixKeys
from tests.support.prefix_match import matched


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Compute and publish the full blocks of a sequence; it holds them."""
    keys = PrefixKeys(tokens, pool.block_tokens, salt)
    blocks = pool.allocate(len(tokens) // pool.block_tokens)
    for index, block in enumerate(blocks):
        pool.publish(block, keys[index])
    return blocks


def test_low_block_ids_go_first_and_come_back_first():
    pool = BlockPool(8, 8, 4, True)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([1])
    assert pool.allocate(2) == [1, 3]
    assert (pool.num_free, pool.num_held, pool.num_cached, pool.available) == (4, 4, 0, 4)
    pool.check()


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, 8, 4, True)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks wanted, 1 of 4 committed available"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


def test_freeing_a_block_nobody_holds_is_caught():
    pool = BlockPool(4, 4, 4, True)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="block 0 is freed but nobody holds it"):
        pool.free(blocks)


def test_a_match_ends_where_tokens_differ_and_what_follows_is_not_reused():
    pool = BlockPool(8, 8, 4, True)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert matched(pool, [1, 2, 3, 4, 5, 0, 7, 8, 9, 10, 11, 12, 13], "") == (blocks[:1], 4)
    assert matched(pool, [5, 6, 7, 8, 9], "") == ([], 0)  # same tokens, other parent


def test_a_salt_separates_equal_prompts():
    pool = BlockPool(8, 8, 4, True)
    mine = fill(pool, [1, 2, 3, 4], "tenant-a")
    assert matched(pool, [1, 2, 3, 4, 5], "tenant-a") == (mine, 4)
    assert matched(pool, [1, 2, 3, 4, 5], "tenant-b") == ([], 0)
    assert matched(pool, [1, 2, 3, 4, 5], "") == ([], 0)


def test_keys_do_not_depend_on_when_they_are_asked_for_and_follow_appended_tokens():
    tokens = [1, 2, 3, 4]
    grown = PrefixKeys(tokens, 4, "s")
    first = grown[0]
    tokens += [5, 6, 7, 8]
    assert grown[1] == PrefixKeys([1, 2, 3, 4, 5, 6, 7, 8], 4, "s")[1]
    assert (grown[0], len(grown[1])) == (first, 32)


def test_a_block_that_is_not_full_has_no_key():
    with pytest.raises(AssertionError, match="block 1 has 2 of 4 tokens"):
        PrefixKeys([1, 2, 3, 4, 5, 6], 4, "")[1]


def test_a_block_is_not_matchable_before_it_is_published():
    pool = BlockPool(4, 4, 4, True)
    (block,) = pool.allocate(1)
    assert matched(pool, [1, 2, 3, 4, 5], "") == ([], 0)
    pool.free([block])
    assert (pool.num_free, pool.num_cached) == (4, 0)


def test_with_the_prefix_cache_off_nothing_is_kept():
    pool = BlockPool(4, 4, 4, False)
    blocks = fill(pool, [1, 2, 3, 4])
    assert matched(pool, [1, 2, 3, 4, 5], "") == ([], 0)
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 0)


def test_the_second_block_with_the_same_content_stays_private():
    pool = BlockPool(4, 4, 4, True)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [1, 2, 3, 4])
    assert matched(pool, [1, 2, 3, 4, 5], "") == (first, 4)
    pool.free(second)
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.check()


def test_shared_blocks_come_back_with_their_last_holder():
    pool = BlockPool(4, 4, 4, True)
    blocks = fill(pool, [1, 2, 3, 4])
    pool.hold(blocks)
    pool.free(blocks)
    assert (pool.num_held, pool.references(blocks[0])) == (1, 1)
    pool.free(blocks)
    assert (pool.num_held, pool.num_cached) == (0, 1)
    pool.hold(blocks)  # a hit on a cached block takes it out of the eviction order
    assert (pool.num_held, pool.num_cached) == (1, 0)
    pool.check()


def test_the_least_recently_used_goes_first_and_a_prefix_loses_its_tail_before_its_head():
    pool = BlockPool(5, 5, 2, True)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    old_blocks, new_blocks = fill(pool, old), fill(pool, new)
    pool.free(old_blocks)
    pool.free(new_blocks)
    pool.allocate(2)  # the free one, then one evicted
    assert pool.evictions == 1
    assert matched(pool, [*old, 0], "") == (old_blocks[:1], 2)
    assert matched(pool, [*new, 0], "") == (new_blocks, 4)
    pool.allocate(2)
    assert matched(pool, [*old, 0], "") == ([], 0)
    assert matched(pool, [*new, 0], "") == (new_blocks[:1], 2)
    pool.check()


def test_growth_adds_free_blocks_up_to_the_capacity():
    pool = BlockPool(2, 6, 4, True)
    pool.allocate(2)
    pool.grow_to(5)
    assert (pool.committed, pool.num_free, pool.allocate(3)) == (5, 3, [2, 3, 4])
    for wrong in (4, 7):
        with pytest.raises(ValueError, match=rf"grow_to\({wrong}\): must be between 5 and 6"):
            pool.grow_to(wrong)


def test_shrinking_drops_unreferenced_tail_blocks_cached_ones_too():
    pool = BlockPool(8, 8, 2, True)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])  # 0 1 2
    pool.free(blocks[1:])  # 1 and 2 cached, 0 held
    assert pool.shrink_tail(keep=6) == 2
    assert pool.shrink_tail() == 5
    assert (pool.committed, pool.num_held, pool.num_cached, pool.num_free) == (1, 1, 0, 0)
    assert matched(pool, [1, 2, 3, 4, 5], "") == (blocks[:1], 2)
    pool.grow_to(3)
    assert pool.allocate(2) == [1, 2]
    pool.check()


def test_shrinking_stops_at_a_held_block():
    pool = BlockPool(4, 4, 2, True)
    pool.free(pool.allocate(4)[:3])
    assert pool.shrink_tail() == 0
    pool.check()


def test_books_balance_after_any_sequence_of_operations():
    rng = random.Random(7)
    pool = BlockPool(10, 40, 2, True)
    held: list[list[int]] = []
    for _ in range(2000):
        action = rng.randrange(5)
        tokens = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 6))]
        if action == 0 and pool.available >= len(tokens) // 2:
            held.append(fill(pool, tokens))
        elif action == 1:
            blocks, _ = matched(pool, [*tokens, 9], "")
            pool.hold(blocks)
            held.append(blocks)
        elif action == 2 and held:
            pool.free(held.pop(rng.randrange(len(held))))
        elif action == 3:
            pool.grow_to(rng.randint(pool.committed, min(40, pool.committed + 3)))
        elif action == 4:
            pool.shrink_tail(keep=rng.randrange(40))
        pool.check()
    for blocks in held:
        pool.free(blocks)
    pool.check()
    committed = pool.committed
    assert (pool.num_held, pool.shrink_tail(), pool.committed) == (0, committed, 0)
