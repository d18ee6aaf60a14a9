"""What reaches an attention or experts function is carried, or refused by name."""

import pytest
import torch
from torch import nn

from ostinato.errors import ModelError
from ostinato.graph.hooks import IMPLEMENTATION, CaptureHooks, MaskFact

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 8, 5


def qkv(heads=HEADS, kv_heads=KV_HEADS):
    return [torch.randn(1, count, TOKENS, SIZE) for count in (heads, kv_heads, kv_heads)]


def attend(hooks, *tensors, mask=None, **kwargs):
    mask = MaskFact(0) if mask is None else mask
    return hooks._attention(nn.Identity(), *(tensors or qkv()), mask, **kwargs)


def started() -> CaptureHooks:
    hooks = CaptureHooks()
    hooks.begin(*(torch.zeros(1) for _ in range(4)), None)
    return hooks


def test_facts_come_from_the_call_and_default_where_it_says_nothing():
    hooks = started()
    attend(hooks, scaling=0.25, softcap=30.0, mask=MaskFact(9), sliding_window=9)
    attend(hooks, position_ids=torch.arange(5), use_cache=False, dropout=0.0)
    first, second = hooks.attention
    assert (first.scale, first.softcap, first.window) == (0.25, 30.0, 9)
    assert (second.scale, second.softcap, second.window) == (SIZE**-0.5, 0.0, 0)
    assert [fact.kv_layer for fact in hooks.attention] == [0, 1]


def test_a_layer_that_attends_to_another_layers_keys_shares_its_planes():
    hooks, (query, key, value) = started(), qkv()
    attend(hooks, query, key, value)
    attend(hooks, torch.randn_like(query), key, value)
    assert [fact.kv_layer for fact in hooks.attention] == [0, 0]
    assert len(hooks.kv_layers) == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "attention with s_aux cannot be carried"),
        ({"dropout": 0.1}, "attention with dropout=0.1 cannot be carried"),
        ({"mask": torch.zeros(5, 5)}, r"no causal mask reached its attention \(got Tensor\)"),
        ({"is_causal": False}, "attention is not causal"),
        ({"sliding_window": 7, "mask": MaskFact(9)}, "sliding_window=7 but its mask has window 9"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(kwargs, message):
    with pytest.raises(ModelError, match=f"Identity: {message}"):
        attend(started(), **kwargs)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ModelError, match="3 query heads cannot share 2 KV heads"):
        attend(started(), *qkv(heads=3))


def mask(hooks, function, local_size=None):
    return hooks._mask(mask_function=function, local_size=local_size, config=None)


def test_a_mask_is_taken_for_what_it_lets_through_not_for_its_name():
    hooks = started()
    assert mask(hooks, lambda b, h, q, k: k <= q) == MaskFact(0)
    assert mask(hooks, lambda b, h, q, k: (k <= q) & (k > q - 9), 9) == MaskFact(9)
    for function, size in (
        (lambda b, h, q, k: (k <= q) & (q // 8 == k // 8), 8),  # chunked
        (lambda b, h, q, k: k == k, None),  # bidirectional
        (lambda b, h, q, k: (k <= q) & (k > q - 8), 9),  # one short
        (lambda b, h, q, k: (k <= q) & (k > q - 200), 199),  # one long, past the first probe
    ):
        with pytest.raises(ModelError, match="not causal with a sliding window"):
            mask(hooks, function, size)


def test_experts_of_another_kind_are_refused_by_name():
    experts = nn.Module()
    experts.has_bias = True
    with pytest.raises(ModelError, match="Module: experts with has_bias cannot be carried yet"):
        started()._experts(experts, torch.zeros(1, 8), torch.zeros(1, 2), torch.zeros(1, 2))


def test_the_hooks_are_registered_inside_the_block_only():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with CaptureHooks().registered():
        assert IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS
    assert IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS
