"""The linear layers of a model, learnt from a step that is only noted, and the chains that are timed."""

from typing import Any

import pytest
import torch

from ostinato.ops import skinny_gated, skinny_linear, tuning
from ostinato.ops.skinny_ways import choice_of
from ostinato.ops.tuning import BY_PARTS
from ostinato.runtime.gpu import layer_calls
from ostinato.runtime.gpu.layer_calls import LayerCall, chain_of, error_of, layers_of, noting, truth
from ostinato.runtime.runner import StepShape
from tests.support.captured import capture_tiny
from tests.support.dry_gpu import DryGpu
from tests.support.tiny_models import tiny_config


def linear(out: int, width: int, *, dtype: torch.dtype = torch.bfloat16, **parts: bool) -> LayerCall:
    bias = torch.randn(out).to(dtype) if parts.get("bias") else None
    norm = torch.rand(width).to(dtype) if parts.get("norm") else None
    residual = torch.randn(2, out).to(dtype) if parts.get("residual") else None
    weight = torch.randn(out, width).to(dtype)
    return LayerCall("skinny_linear", weight, (bias, norm, 1e-5, 0.0, True, residual))


def gated(out: int, width: int) -> LayerCall:
    weight, norm = torch.randn(2 * out, width).bfloat16(), torch.rand(width).bfloat16()
    return LayerCall("skinny_gated", weight, (norm, 1e-5, 0.0, True, "silu"))


def learnt(family: str, **changes: Any) -> list[layer_calls.Layer]:
    calls: list[LayerCall] = []
    captured = capture_tiny(tiny_config(family, **changes), torch.bfloat16)[1]
    DryGpu(captured, {}, noting(calls, {})).variants(StepShape(2, 2, 2))
    return layers_of(calls)


def test_a_dry_step_shows_every_layer_of_a_model_with_all_its_weights() -> None:
    config = tiny_config("llama")
    width, inner = config.hidden_size, config.intermediate_size
    head = config.hidden_size // config.num_attention_heads
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * head
    found = {(layer.op, layer.out, layer.width): len(layer.calls) for layer in learnt("llama")}
    assert found == {
        ("skinny_linear", qkv, width): 2,
        ("skinny_linear", width, width): 2,
        ("skinny_gated", inner, width): 2,
        ("skinny_linear", width, inner): 2,
        ("skinny_linear", config.vocab_size, width): 1,
    }


def test_layers_come_by_size_and_have_norms_and_sums_of_their_own() -> None:
    layers = learnt("llama")
    sizes = [sum(call.num_bytes for call in layer.calls) for layer in layers]
    assert sizes == sorted(sizes, reverse=True)
    by_size = {(layer.out, layer.width): layer for layer in layers}
    config = tiny_config("llama")
    down = by_size[config.hidden_size, config.intermediate_size]
    assert all(call.has_residual for call in down.calls)
    head = by_size[config.vocab_size, config.hidden_size].calls[0]
    assert not head.has_residual
    assert head.rest[1] is not None  # the norm
    assert str(down).startswith(f"skinny_linear {config.hidden_size} x {config.intermediate_size}")
    pairs = {call.weight.data_ptr() for call in down.calls}
    assert len(pairs) == 2


@pytest.mark.parametrize(
    "call",
    [
        linear(7, 24),
        linear(40, 24, bias=True, norm=True, residual=True),
        linear(5, 24, dtype=torch.float32, residual=True),
        gated(9, 24),
    ],
    ids=["plain", "all", "float32", "gated"],
)
@pytest.mark.parametrize("piece", [1 << 10, 1 << 28], ids=["pieces", "whole"])
def test_truth_is_the_reference_in_higher_precision(
    call: LayerCall, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_calls, "_PIECE_BYTES", piece)
    out = call.weight.shape[0] // (2 if call.op == "skinny_gated" else 1)
    x, residual = (torch.randn(3, size).to(call.weight.dtype) for size in (24, out))
    wide = torch.float64 if call.weight.dtype == torch.float32 else torch.float32
    rest = [v.to(wide) if isinstance(v, torch.Tensor) else v for v in call.rest]
    if call.has_residual:
        rest[-1] = residual.to(wide)
    module = {"skinny_linear": skinny_linear, "skinny_gated": skinny_gated}[call.op]
    reference = getattr(module, f"{call.op}_reference")
    right = truth(call, x, residual)
    torch.testing.assert_close(right, reference(x.to(wide), call.weight.to(wide), *rest))
    assert right.dtype == wide
    assert error_of(call(x, residual, BY_PARTS), right) < 0.01
    wrong = call(x, residual, BY_PARTS)
    wrong[0, 0] = float("nan")
    assert not error_of(wrong, right) < 1e9


def test_a_call_takes_the_way_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = skinny_linear.CANDIDATES[0]
    seen: list[Any] = []
    monkeypatch.setattr(
        skinny_linear, "_launch", lambda *args, choices: seen.append((args[-1], choices)) or args[0]
    )
    call = linear(8, 16, residual=True)
    x, residual = torch.randn(3, 16).bfloat16(), torch.randn(3, 8).bfloat16()
    call(x, residual, choice_of(config))
    added, choices = seen[0]
    assert added is residual
    assert tuning.choice("skinny_linear", 3, 8, 16, torch.bfloat16, choices) == choice_of(config)


def chain(layer_calls_: list[LayerCall], l2_bytes: int, free_bytes: int = 1 << 40) -> list[LayerCall]:
    (layer,) = layers_of(layer_calls_)
    return chain_of(layer, l2_bytes, free_bytes)


def test_a_chain_has_weights_of_the_model_first_and_no_more_than_it_needs() -> None:
    calls = [linear(16, 16) for _ in range(40)]  # 512 bytes each
    made = chain(calls, 1024)
    assert made == calls[: layer_calls.CHAIN * 2]


def test_copies_fill_a_chain_of_a_model_with_few_layers() -> None:
    calls = [linear(16, 16, norm=True) for _ in range(3)]
    made = chain(calls, 1024)
    assert len({call.weight.data_ptr() for call in made}) == len(made) == layer_calls.CHAIN * 2
    assert torch.equal(made[4].weight, calls[1].weight)
    assert made[4].rest is calls[1].rest


def test_one_large_weight_is_read_again_and_not_copied() -> None:
    call = linear(64, 64)
    made = chain([call], call.num_bytes // layer_calls.CHAIN, 0)
    assert [m.weight is call.weight for m in made] == [True] * layer_calls.LEAST


def test_little_memory_means_fewer_copies_and_none_at_all_an_error() -> None:
    calls = [linear(16, 16)]
    assert len(chain(calls, 512, 3 * 512)) == 4
    with pytest.raises(torch.OutOfMemoryError, match="0 MiB are free"):
        chain(calls, 1024, 512)
    tiny = chain(calls, 1 << 30)  # all that a chain may have, however small
    assert len(tiny) == layer_calls.MOST
