"""Tiles: what a launch is made of, anywhere; the kernel itself on a Hopper GPU; its compilation by NVRTC."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import skinny_gated, skinny_linear, wgmma_linear
from ostinato.ops.cuda_kernels import MAX_SHARED
from ostinato.ops.kernel_store import STORE, Variant
from ostinato.ops.skinny_gated import skinny_gated_reference
from ostinato.ops.skinny_linear import skinny_linear_reference
from ostinato.ops.wgmma_linear import CANDIDATES, Tile, check_tile, default_tile
from ostinato.runtime.gpu.kernel_workers import compile_all
from tests.support.budget import assert_within_budget
from tests.support.cubin import resources

SIZES = (1, 7, 8, 9, 33, 64, 65, 128, 129, 192, 200, 256)


class Launched:
    """Stands for the kernel; keeps what it is launched with."""

    def launch(
        self,
        grid: tuple[int],
        args: Sequence[Any],
        constants: Mapping[str, int],
        *,
        threads: int,
        shared: int,
    ) -> None:
        (self.grid,), self.args, self.constants = grid, args, dict(constants)
        self.threads, self.shared = threads, shared


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    made = Launched()
    monkeypatch.setattr(wgmma_linear, "KERNEL", made)
    monkeypatch.setattr(wgmma_linear, "matrix_map", lambda matrix, box_rows: (matrix, box_rows))
    monkeypatch.setattr(wgmma_linear, "multiprocessors", lambda _: 132)
    return made


def virtual(rows: int, columns: int) -> Tensor:
    return torch.empty(1, 1, dtype=torch.bfloat16).expand(rows, columns)


def all_tiles(num_tokens: int, num_outputs: int, is_gated: bool) -> list[Tile]:
    some = [*CANDIDATES[min(-(-num_tokens // 64), 4)], default_tile(num_tokens, num_outputs, is_gated, 132)]
    return [tile for tile in some if not is_gated or tile.rows // 2 % (8 * tile.split) == 0]


@pytest.mark.parametrize("is_gated", [False, True])
def test_every_tile_covers_all_outputs_and_fits_a_multiprocessor(launched: Launched, is_gated: bool) -> None:
    activation = "silu" if is_gated else ""
    for num_outputs, width in ((6144, 4096), (4096, 14336), (576, 64), (128256, 4096), (8, 8)):
        weight = virtual(num_outputs * (2 if is_gated else 1), width)
        for num_tokens in SIZES:
            for tile in all_tiles(num_tokens, num_outputs, is_gated):
                out = virtual(num_tokens, num_outputs)
                wgmma_linear.launch(virtual(num_tokens, width), weight, out, tile, activation=activation)
                c = launched.constants
                cluster = c["SPLIT"] * c["SHARE"]
                num_steps, token_tiles, tiles = launched.args[-3:]
                outputs = c["BN"] // 2 if is_gated else c["BN"]
                assert (tiles - 1) * outputs < num_outputs <= tiles * outputs
                assert (token_tiles - 1) * 64 * c["WGS"] < num_tokens <= token_tiles * 64 * c["WGS"]
                assert num_tokens <= c["ROWS"] or c["ROWS"] == 64 * c["WGS"]
                assert (num_steps - 1) * 64 < width <= num_steps * 64
                assert launched.grid % cluster == 0
                assert 0 < launched.grid <= -(-token_tiles // c["SHARE"]) * tiles * cluster
                if c["SPLIT"] == 1:
                    assert launched.grid <= 132
                else:  # a block has one tile, whose sums take the place of the ring
                    assert launched.grid == -(-token_tiles // c["SHARE"]) * tiles * cluster
                    ring = c["STAGES"] * (c["ROWS"] + c["BN"]) * 128 + c["SPARE"]
                    assert ring >= c["WGS"] * 64 * c["BN"] * 4
                assert c["STAGES"] >= 2
                assert launched.shared <= MAX_SHARED
                assert launched.threads == c["WGS"] * 128 + 32
                (_, token_box), (_, weight_box) = launched.args[:2]
                loads = 2 if is_gated or c["SHARE"] == 2 else 1
                assert (token_box, weight_box * loads) == (c["ROWS"], c["BN"])


def test_a_ring_of_one_stage_would_wait_for_itself_and_is_refused(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma_linear.STORE, "carveout", 25)
    with pytest.raises(ValueError, match="leaves room for 1 stages of 2 that it needs; take fewer rows"):
        wgmma_linear.launch(virtual(256, 64), virtual(640, 64), virtual(256, 640), Tile(128, 4))


def test_the_sums_of_a_split_find_room_where_the_ring_is_small(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma_linear.STORE, "carveout", 50)
    wgmma_linear.launch(virtual(256, 64), virtual(640, 64), virtual(256, 640), Tile(128, 4, 2))
    c = launched.constants
    ring = c["STAGES"] * (c["ROWS"] + c["BN"]) * 128
    assert ring < 4 * 64 * 128 * 4 == ring + c["SPARE"]
    assert launched.shared == ring + c["SPARE"] + 16 * c["STAGES"] <= MAX_SHARED


def test_the_last_multiplication_reads_nothing_behind_shared_memory(launched: Launched) -> None:
    for rows in (8, 16, 32, 48, 64):
        wgmma_linear.launch(virtual(3, 64), virtual(640, 64), virtual(3, 640), Tile(rows))
        c = launched.constants
        stage = (c["ROWS"] + c["BN"]) * 128
        assert (c["STAGES"] - 1) * stage + 64 * 128 <= launched.shared


def test_what_decides_a_variant_is_one_thing_for_each_class_of_tokens(launched: Launched) -> None:
    tile = Tile(64, 2, 1, 2)
    seen: dict[int, set[tuple[int, ...]]] = {}
    for num_tokens in range(1, 257):
        wgmma_linear.launch(virtual(num_tokens, 64), virtual(640, 64), virtual(num_tokens, 640), tile)
        size = next(c for c in (8, 16, 32, 64, 128, 256) if c >= num_tokens)
        seen.setdefault(size, set()).add(tuple(launched.constants.values()))
    assert [len(variants) for variants in seen.values()] == [1] * 6
    assert len(set.union(*seen.values())) == 6


@pytest.mark.parametrize(
    ("tile", "is_gated", "said"),
    [
        (Tile(12), False, "rows"),
        (Tile(264), False, "rows"),
        (Tile(24), True, "rows"),
        (Tile(24, share=2), False, "rows"),
        (Tile(64, 5), False, "groups"),
        (Tile(64, split=3), False, "split"),
        (Tile(24, split=2), False, "split"),
        (Tile(112, split=2), True, "split"),
        (Tile(64, share=4), False, "share"),
        (Tile(128, 2, 8, 2), False, "split and share"),
        (Tile(200, 3), False, "rows and groups"),
    ],
)
def test_a_tile_that_no_launch_can_have_is_refused_and_named(tile: Tile, is_gated: bool, said: str) -> None:
    with pytest.raises(ValueError, match=rf"the_op: Tile\(.*\) cannot be launched.*: .*{said}"):
        check_tile("the_op", tile, is_gated)


@pytest.mark.parametrize("is_gated", [False, True])
def test_the_default_can_be_launched_for_any_size(is_gated: bool) -> None:
    for num_outputs in (8, 16, 40, 576, 1536, 4096, 14336, 128256, 262144):
        for num_tokens in SIZES:
            check_tile("any", default_tile(num_tokens, num_outputs, is_gated, 132), is_gated)


def test_the_kernel_is_told_what_it_computes_and_where_it_lies(launched: Launched) -> None:
    qkv = torch.empty(100, 640, dtype=torch.float16)
    x, weight = qkv[:, 64:192], torch.empty(64, 128, dtype=torch.float16)
    out, residual = (
        torch.empty(100, 32, dtype=torch.float16),
        torch.empty(100, 40, dtype=torch.float16)[:, :32],
    )
    wgmma_linear.launch(x, weight, out, Tile(32, 2), residual_TN=residual, activation="gelu_tanh")
    (tokens, _), (weights, _), *addresses = launched.args[:5]
    assert tokens == (x.data_ptr(), 100, 128, 640, torch.float16)
    assert weights == (weight.data_ptr(), 64, 128, 128, torch.float16)
    assert addresses == [out.data_ptr(), 0, residual.data_ptr()]
    assert launched.args[5:] == (100, 32, 40, 2, 1, 2), "tokens, outputs, stride, steps and tiles of both"
    flags = ("ACT", "BIAS", "RESIDUAL", "HALF")
    assert [launched.constants[name] for name in flags] == [2, 0, 1, 1]
    bfloat = [part.bfloat16() for part in (x, weight, out, out[0])]
    wgmma_linear.launch(*bfloat[:3], Tile(32, 2), bias_N=bfloat[3], activation="silu")
    assert [launched.constants[name] for name in flags] == [1, 1, 0, 0]
    assert launched.args[3:5] == (bfloat[3].data_ptr(), 0)
    assert launched.args[7] == 0


def test_the_stride_of_a_lone_row_means_nothing(launched: Launched) -> None:
    x = torch.empty(64, dtype=torch.bfloat16).as_strided((1, 64), (1, 1))
    wgmma_linear.launch(x, virtual(16, 64), virtual(1, 16), Tile(16))
    assert launched.args[0][0].stride == 64


def test_what_the_kernel_cannot_read_or_write_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (4, 48))
    assert not wgmma_linear.can_launch(x, weight, ""), "there is no GPU"
    monkeypatch.setattr(wgmma_linear, "is_hopper", lambda _: True)
    ask = wgmma_linear.can_launch
    assert ask(x, weight, "")
    assert ask(x, weight, "silu")
    assert not ask(x, weight[:44], ""), "outputs are stored eight at a time"
    assert ask(x, weight[:40], "")
    assert not ask(x, weight[:40], "silu"), "20 outputs"
    assert not ask(x[:, :60], weight[:, :60], ""), "columns that end inside of 16 bytes"
    assert not ask(x[:, 4:60], weight[:, :56], "")
    assert not ask(x[:, :56], weight[:, 4:60], "")
    assert not ask(x.float(), weight.float(), "")


@pytest.mark.parametrize("first", [0, 1])
def test_odd_rows_beside_the_product_are_read_from_a_copy(launched: Launched, first: int) -> None:
    residual = torch.zeros(4, 17, dtype=torch.bfloat16)[:, first : first + 16]
    x, weight, out = virtual(4, 64), virtual(16, 64), virtual(4, 16)
    wgmma_linear.launch(x, weight, out, Tile(16), bias_N=residual[0], residual_TN=residual)
    bias, added, _, _, stride = launched.args[3:8]
    assert bias % 4 == added % 4 == 0
    assert stride == 16
    assert added != residual.data_ptr()


@pytest.mark.parametrize("half", [0, 1])
def test_every_kind_of_tile_compiles_for_hopper_without_spilling(
    launched: Launched, half: int, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings exists for Linux and Windows only")
    kernel = wgmma_linear.CudaKernel(
        Path(wgmma_linear.__file__).with_suffix(".cu"),
        "wgmma_linear",
        ("ptr",),
        wgmma_linear.headers,
        module="",
        name="",
    )
    for activation, tile in (("", Tile(96, 1, 2)), ("silu", Tile(192, 3)), ("gelu_tanh", Tile(64, 2, 2, 2))):
        weight, out = virtual(4096, 512), virtual(250, 4096 // (2 if activation else 1))
        wgmma_linear.launch(virtual(250, 512), weight, out, tile, activation=activation)
        constants = {**launched.constants, "HALF": half}
        kinds = tuple(("const", value) for value in constants.values())
        variant = Variant("key", "", "", tuple(constants), kinds, (launched.threads, launched.shared))
        binary, cubin = kernel.compile(variant, 90)
        assert (binary.symbol, binary.threads, binary.launch_pdl) == ("wgmma_linear", launched.threads, True)
        used = resources(cubin, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, (tile, used)


def made(num_tokens: int, num_rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """x, weight, bias, norm weight, residual."""
    torch.manual_seed(num_tokens + num_rows)
    x, weight = torch.randn(num_tokens, width) * 2, torch.randn(num_rows, width) / width**0.5
    parts = [x, weight, torch.randn(num_rows), torch.rand(width) + 0.5, torch.randn(num_tokens, num_rows)]
    return [part.to("cuda", dtype) for part in parts]


def wide(args: Sequence[Any]) -> list[Any]:
    return [arg.double() if isinstance(arg, Tensor) else arg for arg in args]


def run_all(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """The outputs of launches whose kernels are compiled before, several at once."""
    with STORE.recording(is_dry=True) as wanted:
        for call in calls:
            call()
    tiles = [v for v in wanted.variants.values() if v.module == wgmma_linear.__name__]
    for binary, cubin in compile_all(STORE.missing(tiles), 90):
        STORE.add(binary, cubin)
    return [call() for call in calls]


BLOCKS_ALONE = (Tile(24), Tile(64, 2), Tile(48, 1))
CLUSTERS = (Tile(64, 2, 2), Tile(64, 2, 1, 2), Tile(64, 1, 2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [BLOCKS_ALONE, CLUSTERS], ids=["alone", "clusters"])
def test_small_layers_match_float64_within_the_budget(tiles: Sequence[Tile]) -> None:
    x, weight, bias, norm, residual = made(130, 272, 328, torch.bfloat16)
    plain, gated = (
        (x, weight, bias, None, 0.0, 0.0, False, residual),
        (x, weight, norm, 1e-6, 0.0, True, "silu"),
    )
    cases = [(skinny_linear.launch, skinny_linear_reference, plain, tile) for tile in tiles]
    cases += [
        (skinny_gated.launch, skinny_gated_reference, gated, tile) for tile in tiles if tile.rows % 32 == 0
    ]
    outs = run_all([partial(launch, *args, config=tile) for launch, _, args, tile in cases])
    for out, (_, reference, args, _) in zip(outs, cases, strict=True):
        # on the CPU, for cuBLAS' product with a bias ends racecheck with an internal error of its own
        given = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
        assert_within_budget(out.cpu(), reference(*wide(given)), reference(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_layers_match_float64_within_the_budget(dtype: torch.dtype) -> None:
    cases = []
    for num_tokens in SIZES:
        for num_rows, width in ((6144, 4096), (1000, 584), (64, 64)):
            x, weight, bias, norm, residual = made(num_tokens, num_rows, width, dtype)
            tile = default_tile(num_tokens, num_rows, False, 132)
            for added in ((bias, norm, residual), (None, None, residual), (None, None, None)):
                cases.append(((x, weight, added[0], added[1], 1e-6, 0.0, True, added[2]), tile))
    launch = skinny_linear.launch
    outs = run_all([partial(launch, *args, config=tile) for args, tile in cases])
    for out, (args, _) in zip(outs, cases, strict=True):
        truth, plain = skinny_linear_reference(*wide(args)), skinny_linear_reference(*args)
        assert_within_budget(out, truth, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_layers_match_float64_within_the_budget(activation: str) -> None:
    cases = []
    for num_tokens in SIZES:
        for num_rows, width in ((14336, 4096), (1008, 584), (64, 64)):
            x, weight, _, norm, _ = made(num_tokens, num_rows, width, torch.bfloat16)
            tile = default_tile(num_tokens, num_rows // 2, True, 132)
            cases.append(((x, weight, norm, 1e-6, 0.0, True, activation), tile))
    outs = run_all([partial(skinny_gated.launch, *args, config=tile) for args, tile in cases])
    for out, (args, _) in zip(outs, cases, strict=True):
        truth, plain = skinny_gated_reference(*wide(args)), skinny_gated_reference(*args)
        assert_within_budget(out, truth, plain)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_company_and_padding_may_hold_anything() -> None:
    x, weight, bias, _, residual = made(256, 1024, 512, torch.bfloat16)
    calls, about = [], []
    for num_tokens in (5, 60, 100, 190, 250):
        whole = x.clone()
        whole[num_tokens:] = float("nan")
        size = next(c for c in (8, 64, 128, 192, 256) if c >= num_tokens)  # a shape of the same kernel
        for tile in {*CANDIDATES[min(-(-num_tokens // 64), 4)]}:
            for rows in (x[:num_tokens], x[:num_tokens], whole[:size]):
                given = {"bias_N": bias, "residual": residual[: len(rows)], "config": tile}
                calls.append(partial(skinny_linear.launch, rows, weight, **given))
            about.append((num_tokens, tile))
    outs = iter(run_all(calls))
    for (num_tokens, tile), first, again, company in zip(about, outs, outs, outs, strict=True):
        assert torch.equal(first, again), (num_tokens, tile)
        assert torch.equal(first, company[:num_tokens]), (num_tokens, tile)


@pytest.mark.gpu
def test_views_with_strides_are_read_where_they_are() -> None:
    x, weight, _, _, residual = made(20, 512, 640, torch.bfloat16)
    qkv = torch.full((20, 1024), float("nan"), dtype=torch.bfloat16, device="cuda")
    view = qkv[:, 64 : 64 + 640].copy_(x)
    odd = torch.zeros(20, 513, dtype=torch.bfloat16, device="cuda")[:, 1:].copy_(residual)
    for added in (residual, odd):
        ours = skinny_linear.launch(view, weight, None, None, 0.0, 0.0, False, added, config=Tile(32))
        assert torch.equal(ours, skinny_linear.launch(x, weight, residual=residual, config=Tile(32)))
