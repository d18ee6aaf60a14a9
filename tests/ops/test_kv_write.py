import pytest
import torch
from torch import Tensor

from ostinato.ops import kv_write
from ostinato.ops.kv_write import OP
from tests.support.op_routes import FLOATS, ROUTES, assert_graph_replays, on_gpu, run, sized


def case(
    num_tokens: int, kv_heads: int, k_size: int, v_size: int, block_tokens: int, dtype: torch.dtype
) -> list[Tensor]:
    """k and v are slices of one merged tensor; every third slot is -1; the planes are NaN."""
    merged = torch.randn(num_tokens, kv_heads * (k_size + v_size)).to(dtype)
    k, v = merged.split([kv_heads * k_size, kv_heads * v_size], dim=1)
    num_blocks = -(-num_tokens // block_tokens) + 2
    slots = torch.randperm(num_blocks * block_tokens)[:num_tokens]
    slots[::3] = -1
    planes = (
        torch.full((num_blocks, block_tokens, kv_heads, size), float("nan"), dtype=dtype)
        for size in (k_size, v_size)
    )
    return [k.unflatten(1, (kv_heads, k_size)), v.unflatten(1, (kv_heads, v_size)), *planes, slots]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_row_lands_in_its_slot_and_nothing_else_changes(route: str, dtype: torch.dtype) -> None:
    tiny = [(0, 2, 8, 8, 4), (1, 1, 1, 1, 1), (7, 3, 5, 12, 4), (5, 2, 96, 80, 16), (9, 1, 16, 16, 6)]
    real = [(8192, 8, 128, 128, 16)]  # each shape is a kernel to compile
    if dtype == torch.bfloat16:
        real += [*tiny, (300, 2, 576, 512, 64), (256, 16, 256, 256, 32)]
    for num_tokens, kv_heads, k_size, v_size, block_tokens in sized(route, tiny, real):
        k, v, k_cache, v_cache, slots = case(num_tokens, kv_heads, k_size, v_size, block_tokens, dtype)
        run(route, kv_write, k, v, k_cache, v_cache, slots)
        for rows, plane in ((k, k_cache), (v, v_cache)):
            flat = plane.flatten(0, 1)
            written = slots[slots >= 0]
            assert torch.equal(flat[written], rows[slots >= 0])
            others = torch.ones(len(flat), dtype=torch.bool)
            others[written] = False
            assert flat[others].isnan().all()


@pytest.mark.parametrize("route", ROUTES)
def test_int32_slots_strided_planes_and_transposed_rows_are_right(route: str) -> None:
    both = torch.zeros(2, 3, 4, 2, 8)  # K and V interleaved in one tensor, three-fold strided
    k, v = torch.randn(2, 8, 5, 2).permute(0, 2, 3, 1)  # last dimension not dense
    slots = torch.tensor([0, 5, 11, -1, 6], dtype=torch.int32)
    expected = torch.zeros(2, 12, 2, 8)
    expected[0, [0, 5, 11, 6]], expected[1, [0, 5, 11, 6]] = k[[0, 1, 2, 4]], v[[0, 1, 2, 4]]
    planes = both.transpose(0, 1).contiguous().unbind(1)
    run(route, kv_write, k, v, *planes, slots)
    assert torch.equal(torch.stack([plane.flatten(0, 1) for plane in planes]), expected)


@pytest.mark.parametrize("route", ROUTES)
def test_a_second_write_to_a_slot_wins(route: str) -> None:
    k, v, k_cache, v_cache, _ = case(4, 2, 8, 8, 4, torch.float32)
    slots = torch.tensor([3, 2, 1, 0])
    run(route, kv_write, k, v, k_cache, v_cache, slots)
    run(route, kv_write, k + 1, v + 1, k_cache, v_cache, slots)
    assert torch.equal(k_cache[0], (k + 1).flip(0))
    assert torch.equal(v_cache[0], (v + 1).flip(0))


def test_a_slot_past_the_plane_is_an_error_on_cpu() -> None:
    k, v, k_cache, v_cache, _ = case(1, 2, 8, 8, 4, torch.float32)
    with pytest.raises(IndexError, match="out of bounds"):
        OP(k, v, k_cache, v_cache, torch.tensor([k_cache.shape[0] * 4]))


def test_other_shapes_and_types_are_refused_with_both_sides_named() -> None:
    k, v, k_cache, v_cache, slots = case(4, 2, 8, 8, 4, torch.float32)
    with pytest.raises(
        ValueError, match=r"k_cache has shape \[3, 4, 1, 8\], k \[4, 2, 8\]: \[G\] is 1 and 2"
    ):
        OP(k, v, k_cache[:, :, :1], v_cache, slots)
    with pytest.raises(ValueError, match=r"v_cache has shape .*: \[N\] is 2 and 3"):
        OP(k, v, k_cache, v_cache[:2], slots)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[3\], k \[4, 2, 8\]: \[T\] is 3 and 4"):
        OP(k, v, k_cache, v_cache, slots[:3])
    with pytest.raises(ValueError, match=r"k_cache is torch.bfloat16 but k is torch.float32"):
        OP(k, v, k_cache.bfloat16(), v_cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping is torch.float32; allowed are int32, int64"):
        OP(k, v, k_cache, v_cache, slots.float())
    with pytest.raises(ValueError, match="the last one must be 1 on a GPU"):
        kv_write._launch(k, v, k_cache.transpose(2, 3).contiguous().transpose(2, 3), v_cache, slots)


def test_opcheck_and_rows_of_one_base_survive_compilation() -> None:
    k, v, k_cache, v_cache, slots = case(5, 2, 8, 12, 4, torch.float32)
    torch.library.opcheck(OP, (k, v, k_cache.zero_(), v_cache.zero_(), slots))

    def step(k: Tensor, v: Tensor, base: Tensor, slots: Tensor) -> Tensor:
        OP(k, v, base[0], base[1], slots)
        OP(k + 1, v, base[0], base[1], slots.clamp(max=3))  # some rows twice, in order
        return base[0] + base[1]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 3):
        k, v, _, _, slots = case(num_tokens, 2, 8, 8, 4, torch.float32)
        slots = slots % 8
        eager_base, base = torch.zeros(2, 2, 4, 2, 8), torch.zeros(2, 2, 4, 2, 8)
        eager = step(k, v, eager_base, slots)
        assert torch.equal(compiled(k, v, base, slots), eager)
        assert torch.equal(base, eager_base)
        assert base.count_nonzero() > 0


def test_dead_code_removal_keeps_a_write_whose_result_nobody_uses() -> None:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("k", "v", "k_cache", "v_cache", "slots")]
    graph.call_function(OP, tuple(inputs))
    graph.output(inputs[0])
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [OP]


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    old, new = (case(33, 8, 128, 128, 16, torch.bfloat16) for _ in range(2))
    assert_graph_replays(kv_write, old, new)


@pytest.mark.gpu
def test_offsets_past_2_to_31_are_right() -> None:
    kv_heads, size, block_tokens = 8, 128, 64
    num_blocks = 2**31 // (kv_heads * size * block_tokens) + 2
    plane = torch.zeros(num_blocks, block_tokens, kv_heads, size, dtype=torch.bfloat16, device="cuda")
    k = on_gpu(torch.randn(1, kv_heads, size).bfloat16())
    OP(k, k, plane, plane, torch.tensor([num_blocks * block_tokens - 1], device="cuda"))
    assert torch.equal(plane[-1, -1], k[0])
    assert plane[:2].count_nonzero() == 0
