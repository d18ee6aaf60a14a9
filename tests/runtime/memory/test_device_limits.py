"""What may be taken of a GPU: what is free, less the headroom."""

import pytest

from ostinato.runtime.memory.device_limits import DeviceLimits


def test_the_headroom_stays_with_others():
    free = [5_000]
    limits = DeviceLimits(lambda: (free[0], 9_000), 2_000)
    assert (limits.available(), limits.read().total_bytes, limits.read().free_bytes) == (3_000, 9_000, 5_000)
    free[0] = 1_999
    assert limits.available() == 0
    with pytest.raises(ValueError, match="headroom_bytes=-1"):
        DeviceLimits(lambda: (0, 0), -1)
