"""What a native kernel is handed: rows and strides of tensors, one packed struct, or nothing at all."""

from struct import unpack
from types import SimpleNamespace

import pytest
import torch

from ostinato.ops import all_ops, kv_write, paged_attention, rms_norm, silu_mul  # noqa: F401  # all_ops registers the ops
from ostinato.ops.native_calls import (
    bind_kv_write,
    bind_paged_attention,
    bind_rms_norm,
    bind_silu_mul,
    row_stride,
    rows_of,
)
from tests.support.op_cases import Heads, paged_case


class Library:
    """Stands in for kernels.so: keeps the structs that its kernels get and returns `answer`."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[str, bytes]] = []

    def __getattr__(self, name: str) -> object:
        def kernel(packed: bytes) -> int:
            self.calls.append((name, packed))
            return self.answer

        return kernel


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(3, 8), 8),
        (torch.empty(8), 8),
        (torch.empty(3, 16)[:, :8], 16),
        (torch.empty(5, 3, 16)[..., 8:], 16),
        (torch.empty(1, 3, 16)[..., :8], 16),
        (torch.empty(8).expand(3, 8), 0),
        (torch.empty(3, 1).expand(3, 8), -1),  # within a row
        (torch.empty(8, 3).T, -1),
        (torch.empty(5, 3, 16)[:, :2, :8], -1),  # rows of two distances
        (torch.empty(3, 1)[:, :1], 1),
        (torch.empty(1, 5, 8).expand(4, 5, 8), -1),
    ],
)
def test_rows_of_a_tensor_have_one_distance_or_none(tensor: torch.Tensor, stride: int):
    assert row_stride(tensor) == stride


def test_rows_are_taken_where_they_are_and_copied_only_without_a_stride():
    merged = torch.arange(48.0).view(3, 16)
    rows, stride = rows_of(merged[:, 8:], 8)
    assert (rows.data_ptr(), stride) == (merged.data_ptr() + 8 * 4, 16)
    turned = torch.arange(24.0).view(8, 3).T
    rows, stride = rows_of(turned, 8)
    assert stride == 8
    assert rows.is_contiguous()
    assert torch.equal(rows, turned)


@pytest.mark.parametrize(("dtype", "suffix"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")])
def test_a_gated_activation_gets_halves_of_a_merged_tensor_without_a_copy(dtype: torch.dtype, suffix: str):
    library, merged = Library(), torch.zeros(5, 16, dtype=dtype)
    gate, up = merged[:, :8], merged[:, 8:]
    out = bind_silu_mul(library)(gate, up)
    ((name, packed),) = library.calls
    assert name == f"silu_mul_{suffix}"
    assert unpack("7q", packed) == (gate.data_ptr(), 16, up.data_ptr(), 16, out.data_ptr(), 5, 8)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((5, 8), dtype, True)


def test_a_norm_says_whether_its_weight_is_wider_than_its_input():
    library, x = Library(), torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    norm = bind_rms_norm(library)
    for weight, is_wide in ((torch.ones(8), 1), (torch.ones(8, dtype=torch.bfloat16), 0)):
        out = norm(x, weight, 1e-5, 1.0, True)
        at = (x.data_ptr(), 8, 0, 0, weight.data_ptr(), is_wide, out.data_ptr(), 0, 6, 8)
        assert unpack("10q2dq", library.calls.pop()[1]) == (*at, 1e-5, 1.0, 1)


def test_a_slot_that_the_kernel_objects_to_is_an_index_error_with_token_and_slot():
    k, slots = torch.zeros(3, 2, 4), torch.tensor([0, 1, 99])
    planes = torch.zeros(5, 4, 2, 4)
    with pytest.raises(IndexError, match="kv_write: slot 99 of token 2 is past the planes of 20 slots"):
        bind_kv_write(Library(answer=3))(k, k, planes, planes.clone(), slots)


def test_what_no_kernel_takes_reaches_the_torch_op_and_not_the_library(monkeypatch):
    x, planes = torch.ones(3, 8), torch.zeros(5, 4, 2, 4)
    k, slots = torch.zeros(3, 2, 4), torch.tensor([0, 1, 2])
    cases = [
        (silu_mul, bind_silu_mul, (x.half(), x.half())),
        (silu_mul, bind_silu_mul, (x, x.bfloat16())),
        (silu_mul, bind_silu_mul, (x, x[:1])),
        (rms_norm, bind_rms_norm, (x, torch.ones(8, dtype=torch.float64), 1e-6, 0.0, True)),
        (rms_norm, bind_rms_norm, (x, torch.ones(16)[::2], 1e-6, 0.0, True)),
        (rms_norm, bind_rms_norm, (x, torch.ones(7), 1e-6, 0.0, True)),
        (kv_write, bind_kv_write, (k, k, planes, planes, slots.int())),
        (kv_write, bind_kv_write, (k, k, planes, planes[..., :3], slots)),
        (kv_write, bind_kv_write, (k, k, planes, planes, slots[:2])),
    ]
    for module, bind, args in cases:
        reached = SimpleNamespace(args=None)
        monkeypatch.setattr(module, "OP", lambda *given, reached=reached: vars(reached).update(args=given))
        library = Library()
        bind(library)(*args)
        assert library.calls == []
        assert all(got is want for got, want in zip(reached.args, args, strict=True))


@pytest.mark.parametrize("by_name", [False, True])
def test_an_attention_with_sinks_is_computed_by_the_torch_op(by_name: bool):
    case = paged_case([9, 5], [2, 1], Heads(4, 2, 8, 12), block_tokens=4)
    library, sinks = Library(), torch.linspace(-1, 1, 4)
    attention, args = bind_paged_attention(library), case.args(scale=0.3)[:9]
    assert attention(*args).shape == attention(*args, None).shape == (3, 4, 12)
    assert [name for name, _ in library.calls] == ["paged_attention_f32"] * 2
    out = attention(*args, sinks=sinks) if by_name else attention(*args, sinks)
    assert len(library.calls) == 2, "the kernel of a library knows no sinks"
    assert torch.equal(out, paged_attention.paged_attention_reference(*args, sinks))
    assert not torch.equal(out, paged_attention.paged_attention_reference(*args))
