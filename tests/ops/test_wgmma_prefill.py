"""Prefill by tensor cores: what is left to Triton, what a launch is made of; the kernel on a Hopper GPU."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import paged_attention, wgmma_prefill
from ostinato.ops.cuda_kernels import MAX_SHARED, CudaKernel
from ostinato.ops.kernel_store import Variant
from ostinato.ops.paged_attention import paged_attention_reference
from tests.support.budget import assert_within_budget
from tests.support.cubin import resources


def made(
    heads: int,
    kv_heads: int,
    block: int,
    steps: Sequence[tuple[int, int]],
    *,
    device: str = "cpu",
    spare: int = 0,
) -> tuple[Any, ...]:
    """q, planes, tables, lengths, starts, scale; steps: new tokens and length of a sequence.

    `spare` rows of q lie behind the last. What no query may see is NaN.
    """
    seed = torch.Generator().manual_seed(heads + len(steps))
    counts = [-(-length // block) for _, length in steps]
    num_blocks = sum(counts) + 3
    planes = [torch.randn(num_blocks, block, kv_heads, 128, generator=seed).bfloat16() for _ in range(2)]
    order = torch.randperm(num_blocks, generator=seed)
    tables, at = torch.full((len(steps), max(counts) + 2), num_blocks - 1, dtype=torch.int32), 0
    unused = torch.ones(num_blocks, block, dtype=torch.bool)
    for row, ((_, length), count) in enumerate(zip(steps, counts, strict=True)):
        tables[row, :count] = order[at : at + count]
        for place in range(length):
            unused[tables[row, place // block], place % block] = False
        at += count
    for plane in planes:
        plane[unused] = float("nan")
    new = [count for count, _ in steps]
    q = torch.randn(sum(new) + spare, heads, 128, generator=seed).bfloat16()
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in steps], dtype=torch.int32)
    return (*(t.to(device) for t in (q, *planes, tables, lengths, starts)), 128**-0.5, 0, 0.0)


class Launched:
    """Stands for the kernel; keeps what it is launched with."""

    def launch(
        self,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, int],
        *,
        threads: int,
        shared: int,
    ) -> None:
        self.grid, self.args, self.constants = grid, args, dict(constants)
        self.threads, self.shared = threads, shared


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    stands_in = Launched()
    monkeypatch.setattr(wgmma_prefill, "KERNEL", stands_in)
    monkeypatch.setattr(wgmma_prefill, "is_hopper", lambda _: True)
    monkeypatch.setattr(wgmma_prefill, "box_map", lambda boxes: boxes)
    return stands_in


@pytest.mark.parametrize(("heads", "kv_heads", "block"), [(32, 8, 16), (8, 8, 8), (32, 2, 128)])
def test_a_launch_has_a_block_for_every_tile_and_boxes_of_whole_rows(
    launched: Launched, heads: int, kv_heads: int, block: int
) -> None:
    for steps in ([(300, 300)], [(1, 9), (200, 233), (99, 99)], [(2, 2)] * 130):
        args = made(heads, kv_heads, block, steps)
        min_new = 2 if len(steps) > 1 else 1
        wgmma_prefill.launch(*args[:6], torch.empty_like(args[0]), args[6], min_new=min_new)
        c = launched.constants
        queries, boxes = c["QUERIES"], launched.args[:3]
        assert c["GROUP"] * queries == 128
        tiles = sum(-(-new // queries) for new, _ in steps if new >= min_new)
        assert launched.grid[0] == kv_heads
        assert launched.grid[1] >= tiles + 1
        assert launched.threads == 384
        assert launched.shared + 1024 <= MAX_SHARED, "and what is declared in the source"
        assert boxes[0].box == (64, c["GROUP"], queries)
        assert boxes[1].box == boxes[2].box == (64, 1, block, 1)
        assert boxes[0].shape == (128, heads, len(args[0]))
        assert [box.address for box in boxes] == [operand.data_ptr() for operand in args[:3]]
        assert launched.args[7:12] == (len(steps), len(args[0]), args[3].shape[1], heads, min_new)
        assert launched.args[12] == pytest.approx(128**-0.5 / math.log(2)), "exponentials are of 2"


def test_operands_with_strides_are_read_where_they_are(launched: Launched) -> None:
    q, k, _, tables, lengths, starts, scale, *_ = made(8, 2, 16, [(200, 233), (99, 99)])
    merged = torch.zeros(len(q), 12, 128, dtype=q.dtype)  # heads of K and V behind those of q
    both = torch.zeros(len(k), 16, 2, 2, 128, dtype=k.dtype)  # K and V side by side in a block
    wide = torch.zeros(2, 40, dtype=torch.int32)
    views = merged[:, :8], both[:, :, 0], both[:, :, 1]
    out = torch.empty_like(q)
    wgmma_prefill.launch(*views, wide[:, :20], lengths, starts, out, scale, min_new=2)
    queries, *planes = launched.args[:3]
    assert (queries.address, queries.strides) == (merged.data_ptr(), (128, 12 * 128))
    for plane, view in zip(planes, views[1:], strict=True):
        assert (plane.address, plane.strides) == (view.data_ptr(), (128, 4 * 128, 16 * 4 * 128))
    assert (launched.args[4], launched.args[9]) == (wide.data_ptr(), 40)
    turned = tables.t().contiguous().t()
    wgmma_prefill.launch(*views, turned, lengths, starts, out, scale, min_new=2)
    assert launched.args[4] != turned.data_ptr(), "entries of a sequence that lie apart are copied"
    assert launched.args[9] == tables.shape[1]


def test_copies_of_indices_live_until_the_launch(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def launch(*args: Any, **_: Any) -> None:
        addresses = zip(args[1][4:7], (2 * 5, 2, 3), strict=True)
        seen.extend(list((ctypes.c_int * count).from_address(address)) for address, count in addresses)

    monkeypatch.setattr(launched, "launch", launch)
    args = [*made(8, 2, 128, [(200, 233), (99, 300)])]
    args[3:6] = wide = [index.long() for index in args[3:6]]
    wgmma_prefill.launch(*args[:6], torch.empty_like(args[0]), args[6], min_new=2)
    assert seen == [index.flatten().tolist() for index in wide]


def test_what_the_kernel_does_not_do_is_left_to_triton(launched: Launched) -> None:
    q, k, v, *_ = made(8, 2, 16, [(300, 300)])
    ask = wgmma_prefill.can_launch
    assert ask(q, k, v, 0, 0.0, None)
    assert ask(q[:256], k, v, 0, 0.0, None)
    assert not ask(q[:255], k, v, 0, 0.0, None)
    assert not ask(q, k, v, 64, 0.0, None)
    assert not ask(q, k, v, 0, 30.0, None)
    assert not ask(q, k, v, 0, 0.0, torch.zeros(8))
    assert not ask(q.half(), k.half(), v.half(), 0, 0.0, None)
    assert not ask(q[..., :64], k[..., :64], v[..., :64], 0, 0.0, None)
    assert not ask(q[:, :6], k, v, 0, 0.0, None)
    assert not ask(q, k[:, :12], v[:, :12], 0, 0.0, None)


def test_what_the_copy_engine_cannot_read_is_left_to_triton(launched: Launched) -> None:
    q, k, v, *_ = made(8, 2, 16, [(300, 300)])
    odd = q.new_zeros(300, 8, 132)
    assert not wgmma_prefill.can_launch(odd[..., :128], k, v, 0, 0.0, None), "rows that begin at odd bytes"
    shifted = q.new_zeros(300, 8, 136)[..., 4:132]
    assert not wgmma_prefill.can_launch(shifted, k, v, 0, 0.0, None), "a first row that does"
    apart = k.new_zeros(len(k), 16, 2, 256)[..., ::2]
    assert not wgmma_prefill.can_launch(q, apart, v, 0, 0.0, None), "values that lie apart"


def test_it_compiles_for_hopper_without_spilling(launched: Launched, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    source = Path(wgmma_prefill.__file__).with_suffix(".cu")
    kernel = CudaKernel(source, "wgmma_prefill", ("ptr",), wgmma_prefill.headers, module="", name="")
    for heads, kv_heads, block in ((32, 8, 16), (8, 8, 128)):
        args = made(heads, kv_heads, block, [(300, 300)])
        wgmma_prefill.launch(*args[:6], torch.empty_like(args[0]), args[6], min_new=1)
        kinds = tuple(("const", value) for value in launched.constants.values())
        variant = Variant("k", "", "", tuple(launched.constants), kinds, (launched.threads, launched.shared))
        binary, cubin = kernel.compile(variant, 90)
        assert (binary.symbol, binary.threads) == ("wgmma_prefill", 384)
        used = resources(cubin, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, used


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "block"), [(32, 8, 16), (8, 8, 32), (16, 2, 128)])
def test_the_kernel_matches_float64_within_the_budget(heads: int, kv_heads: int, block: int) -> None:
    for steps, spare in (
        ([(300, 300)], 0),
        ([(256, 1000)], 5),
        ([(1, 77), (200, 331), (129, 129), (31, 640), (2, 2)], 37),
        ([(400, 390), (100, 100)], 0),  # tokens that the length does not cover
    ):
        args = made(heads, kv_heads, block, steps, device="cuda", spare=spare)
        ours = paged_attention._launch(*args)
        assert wgmma_prefill.can_launch(*args[:3], 0, 0.0, None)
        wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        assert_within_budget(ours, paged_attention_reference(*wide), paged_attention_reference(*args))
        assert torch.equal(ours, paged_attention._launch(*args))
        assert not spare or not ours[-spare:].any()
