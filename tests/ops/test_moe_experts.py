import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.ops.moe_experts import OP, moe_experts_reference
from tests.support.budget import assert_within_budget
from tests.support.op_routes import FLOATS, in_type

T, D, E, FF, K = 6, 8, 5, 12, 2


def case(num_tokens: int = T) -> list[Tensor]:
    index = torch.rand(num_tokens, E).argsort(1)[:, :K]
    weight = torch.rand(num_tokens, K).softmax(-1)
    return [
        torch.randn(num_tokens, D),
        index,
        weight,
        torch.randn(E, 2 * FF, D) / D**0.5,
        torch.randn(E, D, FF) / FF**0.5,
    ]


def one_by_one(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The formula of the docstring, token by token."""
    rows = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token])
        for place in range(index.shape[1]):
            expert = int(index[token, place])
            if expert < len(gate_up):
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                total += weight[token, place] * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [0, 1, T, 33])
def test_matches_float64_within_the_budget(dtype: torch.dtype, num_tokens: int) -> None:
    args = in_type(dtype, case(num_tokens))
    truth = moe_experts_reference(*in_type(torch.float64, args))
    assert_within_budget(OP(*args), truth, moe_experts_reference(*args))


def test_the_reference_is_the_formula() -> None:
    args = in_type(torch.float64, case())
    torch.testing.assert_close(moe_experts_reference(*args), one_by_one(*args), rtol=1e-12, atol=1e-12)


def test_an_index_past_the_experts_adds_nothing() -> None:
    x, index, weight, gate_up, down = in_type(torch.float64, case())
    index[0], index[1, 1] = E, E
    out = OP(x, index, weight, gate_up, down)
    assert out[0].tolist() == [0.0] * D
    torch.testing.assert_close(out, one_by_one(x, index, weight, gate_up, down), rtol=1e-12, atol=1e-12)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    args = case()
    rows = [OP(*(a[i : i + 1] for a in args[:3]), *args[3:]) for i in range(T)]
    # the same products in float32 by other matrix kernels: sums over at most D and FF terms
    torch.testing.assert_close(torch.cat(rows), OP(*args), rtol=1e-5, atol=1e-6)


def test_opcheck_and_one_compiled_graph_for_all_sizes() -> None:
    torch.library.opcheck(OP, tuple(case()))
    compiled = torch.compile(lambda *a: OP(*a) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (3, 7):
        args = case(num_tokens)
        assert torch.equal(compiled(*args), OP(*args) + 1)


def test_other_shapes_and_types_are_refused_with_both_sides_named() -> None:
    x, index, weight, gate_up, down = case()
    with pytest.raises(ValueError, match=r"topk_weight has shape \[5, 2\], x \[6, 8\]: \[T\] is 5 and 6"):
        OP(x, index, weight[:5], gate_up, down)
    with pytest.raises(ValueError, match="gate_up has 23 rows per expert and down 12 columns"):
        OP(x, index, weight, gate_up[:, :23], down)
    with pytest.raises(ValueError, match=r"topk_index is torch.int32; allowed are int64"):
        OP(x, index.int(), weight, gate_up, down)
    with pytest.raises(ValueError, match=r"gate_up is torch.bfloat16 but x is torch.float32"):
        OP(x, index, weight, gate_up.bfloat16(), down)
