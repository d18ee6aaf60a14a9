import ctypes
import mmap
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.errors import ArtifactError, CompileError
from ostinato.ops import (
    add_rms_norm,
    all_ops,  # noqa: F401  # registers every op
    gelu_tanh_mul,
    kv_write,
    native,
    paged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
)
from tests.ops.conftest import Built
from tests.support.budget import assert_within_budget
from tests.support.op_cases import FREED, Heads, dense_attention, paged_case, rope_case

TYPES = [torch.float32, torch.bfloat16]
Ops = Mapping[str, Callable[..., Any]]


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(args: list[Any]) -> list[Any]:
    """Copies of tensors, floating ones in float64; other arguments as they are."""
    return [
        (arg.double() if arg.is_floating_point() else arg.clone()) if isinstance(arg, Tensor) else arg
        for arg in args
    ]


# Building and loading


def test_two_builds_give_the_same_bytes(built: Built, tmp_path: Path) -> None:
    again = native.build(tmp_path / "again.so")
    assert (tmp_path / "again.so").read_bytes() == built.path.read_bytes()
    assert again.source_hash == built.info.source_hash == native.source_hash()
    assert list(tmp_path.iterdir()) == [tmp_path / "again.so"]


def test_the_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in native.sources():
        shutil.copy(path, tmp_path)
    before = native.source_hash()
    monkeypatch.setattr(native, "SOURCE_DIR", tmp_path)
    assert native.source_hash() == before
    with (tmp_path / "native.h").open("a") as file:
        file.write("// changed\n")
    assert native.source_hash() != before


def test_a_build_for_this_cpu_needs_only_what_it_has(built: Built) -> None:
    assert built.info.cpu_features
    assert native.missing_features(built.info.cpu_features) == ()
    assert native.missing_features(("a_new_one", *built.info.cpu_features)) == ("a_new_one",)


def test_a_missing_compiler_is_named_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"no C\+\+ compiler found \(tried g\+\+.*apt-get install g\+\+"):
        native.build(tmp_path / "kernels.so")


def test_an_unknown_target_is_refused_with_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"-march=no-such-cpu .*error"):
        native.build(tmp_path / "kernels.so", march="no-such-cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"cannot load .*kernels\.so.*compile the model"):
        native.load(path)


def test_a_library_without_the_kernels_is_refused() -> None:
    libc = next(name for name in ("libc.so.6", "libc.so") if ctypes.CDLL(name))
    with pytest.raises(ArtifactError, match="set_team"):
        native.load(Path(libc))


# Threads

THREADS = """
import os, sys
from pathlib import Path
import torch
from ostinato.ops import native

linear = native.bind(native.load(Path(sys.argv[1])))["aten::linear"]
weight, x = torch.randn(4096, 256), torch.randn(1, 256)
counts = []
for threads in (1, 3):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    out = linear(x, weight)
    counts.append(len(os.listdir("/proc/self/task")) - before)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(linear(x, weight), out) else 1)
print(counts, os.waitpid(child, 0)[1])
"""


def test_the_team_has_as_many_threads_as_torch_and_survives_a_fork(built: Built) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(built.path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[0, 2] 0", done.stderr


def test_calls_from_several_threads_are_right(native_ops: Ops) -> None:
    linear = native_ops["aten::linear"]
    weight = randn(2048, 128, dtype=torch.float32)
    rows = [randn(1 + i % 9, 128, dtype=torch.float32, seed=i) for i in range(32)]
    with ThreadPoolExecutor(4) as pool:
        for x, out in zip(rows, pool.map(lambda x: linear(x, weight), rows), strict=True):
            torch.testing.assert_close(out, F.linear(x, weight))


# Kernels against their references

NORM_SIZES = [1, 7, 16, 33, 576, 4097]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", NORM_SIZES)
@pytest.mark.parametrize("round_first", [True, False])
def test_norms_are_within_the_budget(
    native_ops: Ops, size: int, dtype: torch.dtype, round_first: bool
) -> None:
    merged = randn(2, 3, 2 * size, dtype=dtype)
    for weight_type in {dtype, torch.float32}:
        weight = randn(size, dtype=weight_type, seed=1)
        for x, residual in (merged.chunk(2, -1), (merged[:1, :1, :size], merged[1:, :1, size:])):
            numbers = (1e-5, 1.0, round_first)
            args = [x, weight, *numbers]
            ours = native_ops["ostinato::rms_norm"](*args)
            assert_within_budget(ours, rms_norm.OP(*in_float64(args)), rms_norm.OP(*args))
            args = [x, residual, weight, *numbers]
            normed, total = native_ops["ostinato::add_rms_norm"](*args)
            plain, plain_total = add_rms_norm.OP(*args)
            assert torch.equal(total, plain_total)
            truth = rms_norm.OP(*in_float64([total, weight, *numbers]))
            assert_within_budget(normed, truth, plain)
            assert normed.is_contiguous()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_zero_row_gives_zeros_and_leaves_the_others_alone(native_ops: Ops, dtype: torch.dtype) -> None:
    x = randn(3, 40, dtype=dtype)
    weight = randn(40, dtype=dtype, seed=1)
    before = native_ops["ostinato::rms_norm"](x, weight, 1e-6, 0.0, True)
    x[1] = 0
    after = native_ops["ostinato::rms_norm"](x, weight, 1e-6, 0.0, True)
    assert torch.equal(after[1], torch.zeros(40, dtype=dtype))
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", [silu_mul, gelu_tanh_mul], ids=["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_are_within_the_budget(native_ops: Ops, op: Any, dtype: torch.dtype) -> None:
    ours = native_ops[op.OP.name()]
    for shape in ((0, 8), (1, 1), (1, 1, 1536), (2, 3, 33), (5, 4099)):
        merged = randn(*shape[:-1], 2 * shape[-1], dtype=dtype) * 4
        gate, up = merged.chunk(2, -1)
        assert_within_budget(ours(gate, up), op.OP(gate.double(), up.double()), op.OP(gate, up))
    gate = torch.tensor([0.0, -0.0, 30, -30, 87, -87, 89, -89, 105, -105, 1e4, -1e4], dtype=dtype)
    up = torch.ones(12, dtype=dtype)
    assert_within_budget(ours(gate, up), op.OP(gate.double(), up.double()), op.OP(gate, up))
    nan = torch.full((3,), float("nan"), dtype=dtype)
    assert ours(nan, torch.ones(3, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_transposed_and_expanded_rows_are_right(native_ops: Ops, dtype: torch.dtype) -> None:
    x = randn(6, 5, 4, dtype=dtype)
    weight = torch.ones(5, dtype=dtype)
    for view in (x.mT, x[::2].mT, x[:1, :, 0].expand(7, 5), x[:1, :, 0].expand(2, 7, 5)):
        assert torch.equal(
            native_ops["ostinato::silu_mul"](view, view),
            native_ops["ostinato::silu_mul"](view.clone(), view.clone()),
        )
        args = (weight, 1e-6, 0.0, True)
        dense = view.clone(memory_format=torch.contiguous_format)
        assert torch.equal(
            native_ops["ostinato::rms_norm"](view, *args), native_ops["ostinato::rms_norm"](dense, *args)
        )


HEADS = [Heads(9, 3, 64, 64), Heads(4, 4, 20, 12), Heads(8, 1, 33, 48), Heads(2, 2, 128, 128)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rope_kv_write_is_within_the_budget(native_ops: Ops, heads: Heads, dtype: torch.dtype) -> None:
    for tokens, norm, interleaved, part in (
        (0, False, False, 1),
        (1, True, False, 1),
        (5, True, True, 2),
        (70, False, False, 2),
    ):
        args = rope_case(
            tokens,
            heads,
            norm=norm,
            interleaved=interleaved,
            num_rotated=heads.k_size // part // 2 * 2,
            dtype=dtype,
        )
        plain, truth = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args], in_float64(args)
        ours = native_ops["ostinato::rope_kv_write"](*args)
        assert_within_budget(ours, rope_kv_write.OP(*truth), rope_kv_write.OP(*plain))
        assert_within_budget(args[5], truth[5], plain[5])
        assert torch.equal(args[6], plain[6])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
def test_kv_write_copies_to_its_slots_and_nowhere_else(
    native_ops: Ops, tokens: int, dtype: torch.dtype
) -> None:
    args = rope_case(tokens, Heads(4, 2, 20, 12), dtype=dtype)
    _, k, v, _, _, k_cache, v_cache, slots = args[:8]
    expected = k_cache.clone(), v_cache.clone()
    kv_write.OP(k, v, *expected, slots)
    assert native_ops["ostinato::kv_write"](k, v, k_cache, v_cache, slots) is None
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


ATTENTION_STEPS = {
    "decode": ((1, 17, 5, 64), (1, 1, 1, 1)),
    "long decode": ((1000, 257), (1, 1)),
    "prefill": ((70, 200), (70, 200)),
    "mixed": ((33, 1, 300, 20, 90), (1, 1, 40, 0, 90)),
    "few new": ((600, 7), (3, 7)),
    "nothing": ((), ()),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("step", ATTENTION_STEPS)
def test_attention_is_within_the_budget(native_ops: Ops, heads: Heads, step: str, dtype: torch.dtype) -> None:
    lengths, num_new = ATTENTION_STEPS[step]
    for window, softcap, block_tokens in ((0, 0.0, 16), (9, 0.0, 4), (0, 3.0, 5)):
        options = {"window": window, "softcap": softcap}
        case = paged_case(
            lengths, num_new, heads, block_tokens=block_tokens, window=window, num_padding=1, dtype=dtype
        )
        args = case.args(**options)
        ours = native_ops["ostinato::paged_attention"](*args)
        assert_within_budget(ours, dense_attention(case, **options), paged_attention.OP(*args))
        assert not ours[len(ours) - 1 :].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sequence_does_not_feel_its_neighbours(native_ops: Ops, dtype: torch.dtype) -> None:
    attention = native_ops["ostinato::paged_attention"]
    case = paged_case((700, 30, 5), (1, 1, 5), HEADS[0], block_tokens=16, dtype=dtype)
    together = attention(*case.args())
    for seq, (first, stop) in enumerate(((0, 1), (1, 2), (2, 7))):
        alone = attention(
            *(case.q[first:stop], case.k_cache, case.v_cache, case.block_tables[seq : seq + 1]),
            *(case.seq_lens[seq : seq + 1], torch.tensor([0, stop - first], dtype=torch.int32), 0.3, 0, 0.0),
        )
        assert torch.equal(alone, together[first:stop])


# Mistakes


@pytest.mark.parametrize("dtype", TYPES)
def test_a_slot_past_the_planes_is_an_error_and_writes_nothing(native_ops: Ops, dtype: torch.dtype) -> None:
    args = rope_case(5, Heads(4, 2, 20, 12), dtype=dtype)
    k_cache, v_cache, slots = args[5:8]
    slots[4] = k_cache.shape[0] * k_cache.shape[1]
    with pytest.raises(IndexError, match="slot 16 of token 4 is past the planes of 16 slots"):
        native_ops["ostinato::rope_kv_write"](*args)
    with pytest.raises(IndexError, match="slot 16 of token 4"):
        native_ops["ostinato::kv_write"](args[1], args[2], k_cache, v_cache, slots)
    assert not k_cache.any()
    assert not v_cache.any()


def test_broken_attention_indices_are_errors_and_no_crash(native_ops: Ops) -> None:
    attention = native_ops["ostinato::paged_attention"]
    args = paged_case((9, 5), (2, 1), HEADS[1]).args()

    def changed(place: int, at: tuple[int, ...], value: int) -> list[Any]:
        copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        copies[place][at] = value
        return copies

    for block in (FREED, -1):
        with pytest.raises(IndexError, match="block_tables names a block"):
            attention(*changed(3, (0, 1), block))
    with pytest.raises(IndexError, match="seq_lens has more tokens than block_tables"):
        attention(*changed(4, (1,), 10**6))
    for start in (-1, 1000):
        with pytest.raises(IndexError, match="query_start must rise"):
            attention(*changed(5, (1,), start))


def test_what_no_kernel_takes_goes_to_the_torch_op(native_ops: Ops) -> None:
    x = randn(3, 8, dtype=torch.float16)
    assert torch.equal(native_ops["ostinato::silu_mul"](x, x), silu_mul.OP(x, x))
    args = (x, x[0].clone(), 1e-6, 0.0, True)
    assert torch.equal(native_ops["ostinato::rms_norm"](*args), rms_norm.OP(*args))
    case = paged_case((9,), (2,), HEADS[1])
    indices = [arg.long() for arg in case.args()[3:6]]
    wide = native_ops["ostinato::paged_attention"](*case.args()[:3], *indices, *case.args()[6:])
    assert torch.equal(wide, paged_attention.OP(*case.args()))


def test_mixed_types_raise_with_the_reason(native_ops: Ops) -> None:
    x = randn(3, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"up is torch.bfloat16 but gate is torch.float32"):
        native_ops["ostinato::silu_mul"](x, x.bfloat16())
    with pytest.raises(ValueError, match=r"weight is torch.float64"):
        native_ops["ostinato::rms_norm"](x, x[0].double(), 1e-6, 0.0, True)
    args = paged_case((9,), (2,), HEADS[1]).args()
    with pytest.raises(ValueError, match=r"v_cache is torch.bfloat16"):
        native_ops["ostinato::paged_attention"](*args[:2], args[2].bfloat16(), *args[3:])
    args = rope_case(5, HEADS[1])
    with pytest.raises(ValueError, match=r"cos is torch.bfloat16; it must be float32"):
        native_ops["ostinato::rope_kv_write"](*args[:3], args[3].bfloat16(), *args[4:])


def test_nothing_is_read_past_the_end_of_a_tensor(native_ops: Ops) -> None:
    """Tensors that end where readable memory ends: reading on would kill the process."""
    page = mmap.PAGESIZE
    pages = []

    def at_the_end(x: Tensor) -> Tensor:
        num_bytes = x.numel() * x.element_size()
        readable = -(-num_bytes // page) * page
        memory = mmap.mmap(-1, readable + page)
        pages.append(memory)
        moved = torch.frombuffer(memory, dtype=torch.uint8)[readable - num_bytes : readable].view(x.dtype)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(moved.data_ptr() + num_bytes), page, 0) == 0
        return moved.view(x.shape).copy_(x)

    for dtype in TYPES:
        x, weight = randn(33, 37, dtype=dtype), randn(13, 37, dtype=dtype)
        for rows in (1, 3, 7, 12, 33):
            args = [x[:rows].clone(), weight, weight[:, 0].clone()]
            out = native_ops["aten::linear"](*map(at_the_end, args))
            torch.testing.assert_close(out, native_ops["aten::linear"](*args), rtol=0, atol=0)
        native_ops["ostinato::silu_mul"](at_the_end(x), at_the_end(x))
        native_ops["ostinato::rms_norm"](at_the_end(x), at_the_end(x[0].clone()), 1e-6, 0.0, True)
        for heads in HEADS:
            case = paged_case((70, 300), (70, 1), heads, block_tokens=10, spare_columns=0, dtype=dtype)
            ours = native_ops["ostinato::paged_attention"](*map(at_the_end, case[:6]), 0.3, 0, 0.0)
            assert torch.equal(ours, native_ops["ostinato::paged_attention"](*case.args()))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64-v3 is a target of x86-64 compilers")
def test_kernels_for_a_cpu_without_avx512_are_within_the_budget(tmp_path: Path) -> None:
    info = native.build(tmp_path / "kernels.so", march="x86-64-v3")
    if missing := native.missing_features(info.cpu_features):
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    assert "avx2" in info.cpu_features
    assert not any(name.startswith("avx512") for name in info.cpu_features)
    ops = native.bind(native.load(tmp_path / "kernels.so"))
    for dtype in TYPES:
        for rows in (1, 3, 8, 12, 40):
            x, weight = randn(rows, 77, dtype=dtype), randn(19, 77, dtype=dtype, seed=1)
            ours, truth = ops["aten::linear"](x, weight), F.linear(x.double(), weight.double())
            assert_within_budget(ours, truth, F.linear(x, weight))
        for heads in HEADS:
            case = paged_case((70, 300), (70, 1), heads, dtype=dtype)
            ours = ops["ostinato::paged_attention"](*case.args())
            assert_within_budget(ours, dense_attention(case), paged_attention.OP(*case.args()))
