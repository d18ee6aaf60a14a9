"""Arrangements of KV planes: segments, strides, and that a block's bytes lie where they should."""

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.ops.kv_write import kv_write_reference
from ostinato.runtime.memory.kv_layout import plan_layout
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.vmm_host import HostVmm
from tests.support.faulty_driver import ModelVmm

EQUAL = KVLayer(kv_heads=2, k_size=8, v_size=8)  # 4 tokens of float32: 256 bytes a block and plane
UNEQUAL = KVLayer(kv_heads=1, k_size=16, v_size=4)  # 256 and 64 bytes
ARRANGEMENTS = ["split", "block_major", "packed"]


def pool_of(arrangement, driver=None, capacity=100, **named) -> KVPool:
    driver = driver or HostVmm(4096)
    return KVPool(
        [EQUAL, UNEQUAL, EQUAL], torch.float32, 4, capacity, driver, arrangement=arrangement, **named
    )


@pytest.mark.parametrize(
    ("arrangement", "buffers", "block_strides"),
    [
        ("split", [(2, 256), (1, 256), (1, 64), (2, 256)], [64, 64, 64, 16, 64, 64]),
        ("block_major", [(1, 512), (1, 320), (1, 512)], [128, 128, 80, 80, 128, 128]),
        ("packed", [(1, 1344)], [336] * 6),
    ],
)
def test_buffers_segments_and_block_strides(arrangement, buffers, block_strides):
    assert plan_layout([EQUAL, UNEQUAL, EQUAL], 4, 4, arrangement).buffers == tuple(buffers)
    pool = pool_of(arrangement)
    planes = pool.planes()
    assert [plane.stride(0) for plane in planes] == block_strides
    assert [plane.shape for plane in planes[2:4]] == [(100, 4, 1, 16), (100, 4, 1, 4)]
    assert pool.block_bytes == 1344


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_planes_do_not_overlap_and_keep_their_content_through_growth_and_shrinking(arrangement):
    pool = pool_of(arrangement)
    pool.commit(10)
    truth = [torch.randn(plane[:10].shape) for plane in pool.planes()]
    for plane, values in zip(pool.planes(), truth, strict=True):
        plane[:10] = values
    assert pool.commit(60) >= 60
    assert all(torch.equal(p[:10], t) for p, t in zip(pool.planes(), truth, strict=True))
    assert all(int(plane[10:60].count_nonzero()) == 0 for plane in pool.planes())
    pool.shrink(10)
    assert all(torch.equal(p[:10], t) for p, t in zip(pool.planes(), truth, strict=True))
    pool.check()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_cache_write_of_a_step_lands_in_the_right_block(arrangement):
    pool = pool_of(arrangement)
    pool.commit(8)
    k_TGD, v_TGD = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    k_cache, v_cache = pool.planes()[4:]
    kv_write_reference(k_TGD, v_TGD, k_cache, v_cache, torch.tensor([9, -1, 30]))
    assert torch.equal(k_cache[2, 1], k_TGD[0])
    assert torch.equal(v_cache[7, 2], v_TGD[2])
    assert sum(int(plane[:8].count_nonzero()) for plane in pool.planes()) == 4 * 16


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_narrowed_views_end_with_the_committed_blocks(arrangement):
    pool = pool_of(arrangement)
    assert [view.shape[0] for view in pool.narrowed()] == [0] * 6
    committed = pool.commit(10)
    for plane, view in zip(pool.planes(), pool.narrowed(), strict=True):
        assert (view.data_ptr(), view.stride(), view.shape[0]) == (
            plane.data_ptr(),
            plane.stride(),
            committed,
        )
        end = view.data_ptr() + (view[-1].numel() + (committed - 1) * view.stride(0)) * 4
        assert end <= view.untyped_storage().data_ptr() + view.untyped_storage().nbytes()
        assert view.untyped_storage().nbytes() <= committed * pool.block_bytes


def test_packed_blocks_take_one_mapping_where_split_ones_take_one_per_plane():
    mapped = {}
    for arrangement in ARRANGEMENTS:
        driver = ModelVmm(4096, has_bytes=True)
        pool_of(arrangement, driver).commit(3)
        mapped[arrangement] = driver.created
    assert mapped == {"split": 6, "block_major": 3, "packed": 1}


def test_an_unknown_arrangement_is_refused():
    with pytest.raises(ValueError, match="arrangement='mixed': must be split, block_major or packed"):
        pool_of("mixed")
