"""How many KV blocks there are at start, and how many there may ever be."""

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.config import KVConfig
from ostinato.runtime.memory.kv_pool import plan_capacity
from ostinato.runtime.memory.memory_limits import MemoryLimits
from tests.support.kv_pools import free_memory

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("kv", "free_mib", "total_mib", "expected"),
    [
        ({}, 6144, 8192, (64, 7168)),  # initial_mib 64; total less 1 GiB of headroom
        ({"max_gib": 2}, 6144, 8192, (64, 2048)),
        ({"max_gib": 100}, 6144, 8192, (64, 7168)),
        ({"initial_mib": 4096, "max_gib": 2}, 6144, 8192, (2048, 2048)),
        ({"initial_mib": 4096}, 2048, 8192, (1024, 7168)),  # no more at start than is free
        ({"headroom_gib": 0}, 10, 8192, (10, 8192)),
        ({"initial_mib": 1}, 6144, 8192, (5, 7168)),  # min_blocks
    ],
)
def test_capacity_follows_limits_and_the_start_what_is_free(tmp_path, kv, free_mib, total_mib, expected):
    free_memory(tmp_path, free_mib, total_mib)
    config = KVConfig(**kv)
    limits = MemoryLimits(int(config.headroom_gib * GIB), tmp_path)
    assert plan_capacity(config, MIB, limits, min_blocks=5) == expected
    assert plan_capacity(config, MIB, limits, min_blocks=5, is_elastic=False) == (expected[0], expected[0])


def test_too_little_memory_is_an_error_with_needed_available_and_a_fix(tmp_path):
    free_memory(tmp_path, 1026.5)
    with pytest.raises(ConfigError) as caught:
        plan_capacity(KVConfig(), MIB, MemoryLimits(GIB, tmp_path), min_blocks=5)
    message = str(caught.value)
    assert message.startswith(
        "KV memory: 5 blocks of 1048576 B (5.0 MiB) are needed, 2 may be taken (1026 MiB free"
    )
    assert "lower kv.headroom_gib" in message
