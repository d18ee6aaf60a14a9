"""What is tried for a linear layer: all of it can be launched, the default first, the parts last."""

import pytest
import torch

from ostinato.ops.skinny_rows import Config, check_config
from ostinato.ops.tuning import CLASSES
from ostinato.ops.wgmma_linear import Tile, check_tile
from ostinato.runtime.gpu.layer_candidates import OPS, candidates

HOPPER = 132
LAYERS = [(6144, 4096), (2048, 6144), (128256, 4096), (576, 576), (48, 64), (8, 8)]


@pytest.mark.parametrize("places", [0, HOPPER])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_candidate_of_every_class_can_be_launched(op: str, places: int, dtype: torch.dtype) -> None:
    places = 0 if dtype == torch.float32 else places
    for out, width in LAYERS:
        for num_tokens in CLASSES if places else CLASSES[:5]:
            ways = candidates(op, num_tokens, out, width, dtype, places)
            assert len(ways) == len(set(ways)) > 1
            assert ways[-1] is None
            for way in ways[:-1]:
                if isinstance(way, Tile):
                    check_tile(op, way, op == "skinny_gated")
                else:
                    assert way is not None
                    check_config(op, way, dtype, num_tokens)


def test_one_token_goes_by_multiply_adds_or_by_parts() -> None:
    ways = candidates("skinny_linear", 1, 6144, 4096, torch.bfloat16, HOPPER)
    assert {way and way.by_tensor_cores for way in ways if not isinstance(way, Tile)} == {False, None}
    assert not [way for way in ways if isinstance(way, Tile)]


@pytest.mark.parametrize(
    ("num_tokens", "places", "kinds"),
    [
        (2, HOPPER, {Config, Tile, type(None)}),
        (4, HOPPER, {Config, Tile, type(None)}),
        (8, HOPPER, {Config, Tile, type(None)}),
        (16, HOPPER, {Tile, type(None)}),
        (256, HOPPER, {Tile, type(None)}),
        (16, 0, {Config, type(None)}),
        (32, 0, {type(None)}),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_kinds_of_candidates_by_tokens_and_gpu(
    op: str, num_tokens: int, places: int, kinds: set[type]
) -> None:
    ways = candidates(op, num_tokens, 2048, 2048, torch.bfloat16, places)
    assert {type(way) for way in ways} == kinds
    assert isinstance(
        ways[0], Tile if places and num_tokens > 2 else Config if num_tokens < 32 else type(None)
    )


def test_multiply_adds_are_tried_where_they_keep_up_with_memory() -> None:
    def most(places: int, dtype: torch.dtype) -> int:
        tried = [
            n
            for n in CLASSES[:5]
            for way in candidates("skinny_linear", n, 2048, 2048, dtype, places)
            if isinstance(way, Config) and not way.by_tensor_cores
        ]
        return max(tried)

    assert [most(HOPPER, torch.bfloat16), most(0, torch.bfloat16), most(0, torch.float32)] == [2, 4, 16]


def test_tiles_that_give_each_multiprocessor_one_block_are_tried() -> None:
    ways = candidates("skinny_linear", 32, 2048, 6144, torch.bfloat16, HOPPER)
    assert {Tile(16, 1), Tile(32, 1, 2), Tile(64, 1, 4)} <= set(ways)


def test_a_list_is_short_enough_to_be_compiled() -> None:
    for op in OPS:
        for num_tokens in CLASSES:
            assert len(candidates(op, num_tokens, 2048, 2048, torch.bfloat16, HOPPER)) <= 22
