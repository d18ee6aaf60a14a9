"""KV blocks that move inside their planes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.graph.facts import KVLayer
from ostinato.runtime.memory.block_copy import copy_blocks
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm_host import HostVmm


@pytest.mark.parametrize("arrangement", ["split", "packed"])
@pytest.mark.parametrize("staging_bytes", [1, 600, 1 << 20])
def test_moved_blocks_have_their_bytes_and_all_others_keep_theirs(arrangement, staging_bytes):
    layers = [KVLayer(kv_heads=2, k_size=8, v_size=8), KVLayer(kv_heads=1, k_size=16, v_size=4)]
    pool = KVPool(layers, torch.float32, 4, 1 << 20, HostVmm(4096), arrangement=arrangement)
    pool.commit(20)
    for plane in pool.planes():
        plane[:20] = torch.randn(plane[:20].shape)
    before = [plane[:20].clone() for plane in pool.planes()]
    moves = [(19, 0), (11, 5), (17, 3), (12, 4)]
    copy_blocks(pool.planes(), moves, staging_bytes=staging_bytes)
    for plane, old in zip(pool.planes(), before, strict=True):
        for source, target in moves:
            old[target] = old[source]
        assert torch.equal(plane[:20], old)


class Watched(TorchDispatchMode):
    """Notes the calls, and the bytes of the largest copy in between."""

    def __init__(self):
        super().__init__()
        self.calls, self.most_bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        if func is torch.ops.aten.index_select.default:
            self.most_bytes = max(self.most_bytes, made.numel() * made.element_size())
        return made


@pytest.mark.parametrize(("staging_bytes", "most"), [(1, 64), (200, 192), (1 << 20, 640)])
def test_the_copy_in_between_takes_no_more_than_is_allowed_but_for_one_block(staging_bytes, most):
    plane = torch.arange(40 * 16).float().view(40, 4, 2, 2)
    with Watched() as watched:
        copy_blocks([plane], [(30 + at, at) for at in range(10)], staging_bytes=staging_bytes)
    assert watched.most_bytes == most
    assert torch.equal(plane[:10], plane[30:])


def test_no_moves_launch_nothing():
    plane = torch.zeros(4, 4, 2, 2)
    with Watched() as watched:
        copy_blocks([plane], [])
    assert watched.calls == []
