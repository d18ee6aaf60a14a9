"""Expected matches: counted from the unfused graph and its modules, one tell-tale per construct."""

import pytest
import torch
from torch import fx, nn

from ostinato.graph.expectations import expected_matches
from ostinato.ops import all_ops  # noqa: F401  # registers the operators
from tests.support.captured import capture_tiny
from tests.support.tiny_models import tiny_config

aten = torch.ops.aten

# From each family's definition: 2 layers, unless its tiny config says otherwise.
COUNTS = {
    "llama": {"merge_linears": 4, "rms_norm": 5, "silu_mul": 2, "rope_kv_write": 2, "rope_table": 1},
    "qwen3": {
        "merge_linears": 4,
        "rms_norm": 9,
        "silu_mul": 2,
        "rope_kv_write": 2,
        "rope_table": 1,
        "fold_qk_norm": 2,
    },
    "gemma2": {"merge_linears": 4, "rms_norm": 9, "gelu_tanh_mul": 2, "rope_kv_write": 2, "rope_table": 1},
    "olmo2": {
        "merge_linears": 4,
        "rms_norm": 9,
        "silu_mul": 2,
        "rope_kv_write": 2,
        "rope_table": 1,
    },  # norms span all heads
    "smollm3": {
        "merge_linears": 8,
        "rms_norm": 9,
        "silu_mul": 4,
        "rope_kv_write": 3,
        "rope_table": 1,
    },  # one layer without
    "starcoder2": {"merge_linears": 2, "rope_kv_write": 2, "rope_table": 1},  # LayerNorm, ungated MLP
    "qwen3_moe": {"merge_linears": 2, "rms_norm": 9, "rope_kv_write": 2, "rope_table": 1, "fold_qk_norm": 2},
}


@pytest.mark.parametrize("family", COUNTS)
def test_counts_follow_from_the_definition(family):
    _, captured = capture_tiny(tiny_config(family))
    assert captured.facts.expected_matches == COUNTS[family]


def graph_of(body) -> fx.Graph:
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in ("x", "w1", "w2", "b"))
    for weight in weights:
        weight.meta["role"] = "weight"
    body(graph, x, *weights)
    return graph


def count(body) -> dict[str, int]:
    return expected_matches(nn.Module(), graph_of(body))


def test_an_activation_counts_only_where_a_tensor_is_multiplied_with_it():
    def gated(graph, x, *_):
        silu = graph.call_function(aten.silu.default, (x,))
        graph.call_function(aten.mul.Tensor, (silu, x))

    def scaled(graph, x, *_):
        silu = graph.call_function(aten.silu.default, (x,))
        graph.call_function(aten.mul.Tensor, (silu, 2.0))

    def exact_gelu(graph, x, *_):
        gelu = graph.call_function(aten.gelu.default, (x,))
        graph.call_function(aten.mul.Tensor, (gelu, x))

    assert count(gated) == {"silu_mul": 1}
    assert count(scaled) == {}
    assert count(exact_gelu) == {}


def test_linears_of_one_input_count_as_one_group_if_all_or_none_have_a_bias():
    def alike(graph, x, w1, w2, _):
        for weight in (w1, w2, w1):
            graph.call_function(aten.linear.default, (x, weight))

    def unlike(graph, x, w1, w2, b):
        graph.call_function(aten.linear.default, (x, w1))
        graph.call_function(aten.linear.default, (x, w2, b))

    assert count(alike) == {"merge_linears": 1}
    assert count(unlike) == {}
