"""Blocks in use leave the tail: books, prefix keys and block tables follow."""

import random

import pytest

from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.scheduling.block_pool import BlockPool
from ostinato.runtime.scheduling.scheduler import Scheduler


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_held_and_cached_blocks_go_down_and_keep_holders_and_keys():
    pool = BlockPool(10, 10, 4, prefix_cache=True)
    blocks = pool.allocate(10)
    for block in (7, 8):
        pool.publish(block, key(block))
    pool.hold([9])  # a second holder
    pool.free([8])
    pool.free([0, 1, 2, 3, 4])
    moves = pool.plan_moves(6)
    assert moves == [(6, 0), (7, 1), (8, 2), (9, 3)]
    pool.move(moves)
    pool.check()
    assert pool.shrink_tail(6) == 4
    pool.check()
    assert [pool.references(block) for block in range(6)] == [1, 1, 0, 2, 0, 1]
    assert (pool.lookup(key(7)), pool.lookup(key(8)), pool.evictions) == (1, 2, 0)
    assert blocks == list(range(10))


def test_cached_blocks_without_room_are_evicted_oldest_first():
    pool = BlockPool(8, 8, 4, prefix_cache=True)
    pool.allocate(8)
    for block in (6, 2, 7, 3):
        pool.publish(block, key(block))
        pool.free([block])
    pool.move(pool.plan_moves(6))  # four held, so two of the four cached stay
    pool.check()
    assert pool.shrink_tail(6) == 2
    assert [pool.lookup(key(block)) is not None for block in (6, 2, 7, 3)] == [False, False, True, True]
    assert pool.evictions == 2


def test_fewer_than_the_held_blocks_cannot_be_kept():
    pool = BlockPool(5, 5, 4, prefix_cache=False)
    pool.allocate(3)
    with pytest.raises(ValueError, match=r"plan_moves\(2\): 3 blocks are held"):
        pool.plan_moves(2)


def test_random_runs_keep_holders_and_matches():
    choose = random.Random(3)
    for _ in range(60):
        pool = BlockPool(40, 40, 4, prefix_cache=True)
        held = pool.allocate(choose.randrange(1, 40))
        matchable = {}
        for block in choose.sample(held, len(held) // 2):
            matchable[block] = key(block)
            pool.publish(block, key(block))
        gone = choose.sample(held, choose.randrange(len(held)))
        for block in gone:
            pool.free([block])
        kept = [block for block in held if block not in gone]
        keep = choose.randrange(len(kept), 41)
        moves = pool.plan_moves(keep)
        place = dict(moves)
        pool.move(moves)
        pool.shrink_tail(keep)
        pool.check()
        assert pool.committed <= keep or not moves
        assert all(pool.references(place.get(block, block)) == 1 for block in kept)
        for block, name in matchable.items():
            found = pool.lookup(name)
            assert found == place.get(block, block) or (block in gone and found is None)


def test_block_tables_of_live_sequences_are_rewritten_between_two_steps():
    pool = BlockPool(12, 12, 4, prefix_cache=True)
    scheduler = Scheduler(pool, SchedulerConfig(max_step_tokens=64), 48, frozenset())
    for name, length in (("a", 9), ("b", 6)):
        scheduler.add(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=tuple(range(length)),
                sampling=SamplingParams(max_tokens=8),
            )
        )
    plan = scheduler.next_plan()
    with pytest.raises(AssertionError, match="under a plan in flight"):
        scheduler.move_blocks([(0, 5)])
    scheduler.complete(plan, {"a": 1, "b": 2})
    tables = {entry.request_id: entry.block_ids for entry in plan.entries}
    spread = [(tables["b"][0], 10), (tables["a"][1], 11)]
    pool.move(spread)
    scheduler.move_blocks(spread)
    scheduler.check()
    moves = pool.plan_moves(pool.num_held)
    pool.move(moves)
    scheduler.move_blocks(moves)
    pool.shrink_tail(pool.num_held)
    scheduler.check()
    assert scheduler.num_in_flight == 0
    after = {entry.request_id: entry.block_ids for entry in scheduler.next_plan().entries}
    assert all(len(after[name]) == len(tables[name]) for name in tables)
    assert max(max(ids) for ids in after.values()) < pool.committed == 5
