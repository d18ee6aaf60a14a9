"""Whole models: every construct of every family is fused, and the arithmetic stays what it was."""

from collections import Counter
from copy import deepcopy

import pytest
import torch

from ostinato.passes import pipeline
from ostinato.passes.config import PassesConfig
from tests.support.budget import assert_within_budget
from tests.support.captured import capture_tiny
from tests.support.graphs import ops, run_step
from tests.support.tiny_models import tiny_config, tiny_model

# Matches of a tiny model: by layer from its definition, not read off the passes.
MATCHES = {
    "llama": "merge_linears 4, rms_norm 5, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "qwen2": "merge_linears 4, rms_norm 5, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "qwen3": "merge_linears 4, rms_norm 9, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1, "
    "fold_qk_norm 2",
    "mistral": "merge_linears 4, rms_norm 5, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "gemma2": "merge_linears 4, rms_norm 9, add_rms_norm 4, gelu_tanh_mul 2, rope_kv_write 2, rope_table 1",
    "gemma3_text": "merge_linears 6, rms_norm 19, add_rms_norm 6, gelu_tanh_mul 3, rope_kv_write 3, "
    "rope_table 2, fold_qk_norm 3",
    "phi3": "rms_norm 5, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "olmo2": "merge_linears 4, rms_norm 9, add_rms_norm 1, silu_mul 2, rope_kv_write 2, rope_table 1",
    "granite": "merge_linears 4, rms_norm 5, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "smollm3": "merge_linears 8, rms_norm 9, add_rms_norm 8, silu_mul 4, rope_kv_write 3, rope_table 1",
    "glm4": "merge_linears 2, rms_norm 9, add_rms_norm 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "starcoder2": "merge_linears 2, rope_kv_write 2, rope_table 1",
    "stablelm": "merge_linears 4, silu_mul 2, rope_kv_write 2, rope_table 1",
    "qwen3_moe": "merge_linears 2, rms_norm 9, add_rms_norm 4, rope_kv_write 2, rope_table 1, fold_qk_norm 2",
    "mixtral": "merge_linears 2, rms_norm 5, add_rms_norm 4, rope_kv_write 2, rope_table 1",
}
# Matches of the decode plan. Per layer 4 linear layers (experts: QKV, output and router), and the logits;
# gate and up joined; two branches that end in a sum, unless scaled or normed first; and the norms ahead of
# linear layers: all where branches are plain, only the first where they are not; and every attention whose
# queries are rotated (one layer of smollm3 has none).
DECODE_MATCHES = {
    "llama": "skinny_linear 9, skinny_gated 2, skinny_residual 4, skinny_norm 5, rope_attention 2",
    "qwen2": "skinny_linear 9, skinny_gated 2, skinny_residual 4, skinny_norm 5, rope_attention 2",
    "qwen3": "skinny_linear 9, skinny_gated 2, skinny_residual 4, skinny_norm 5, rope_attention 2",
    "mistral": "skinny_linear 9, skinny_gated 2, skinny_residual 4, skinny_norm 5, rope_attention 2",
    "gemma2": "skinny_linear 9, skinny_gated 2, skinny_norm 1, rope_attention 2",
    "gemma3_text": "skinny_linear 13, skinny_gated 3, skinny_norm 1, rope_attention 3",
    "phi3": "skinny_linear 9, skinny_gated 2, skinny_residual 4, skinny_norm 5, rope_attention 2",
    "olmo2": "skinny_linear 9, skinny_gated 2, rope_attention 2",
    "granite": "skinny_linear 9, skinny_gated 2, skinny_norm 1, rope_attention 2",
    "smollm3": "skinny_linear 17, skinny_gated 4, skinny_residual 8, skinny_norm 9, rope_attention 3",
    "glm4": "skinny_linear 9, skinny_gated 2, skinny_norm 1, rope_attention 2",
    "starcoder2": "skinny_linear 9, skinny_residual 4, rope_attention 2",
    "stablelm": "skinny_linear 9, skinny_gated 2, skinny_residual 4, rope_attention 2",
    "qwen3_moe": "skinny_linear 7, skinny_residual 2, skinny_norm 1, rope_attention 2",
    "mixtral": "skinny_linear 7, skinny_residual 2, skinny_norm 1, rope_attention 2",
}
GONE = {
    "cos",
    "sin",
    "rsqrt",
    "pow",
    "neg",
    "stack",
    "silu",
    "contiguous",
    "_assert_tensor_metadata",
    "dropout",
}
TIDYING = {"remove_noops", "remove_duplicates"}
CASES = [(family, torch.float32) for family in MATCHES] + [
    (family, torch.bfloat16) for family in ("llama", "gemma3_text", "olmo2", "glm4", "granite")
]


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=[f"{f}-{str(d)[6:]}" for f, d in CASES])
def test_family_is_fused_and_computes_the_same(family, dtype):
    model = tiny_model(family, dtype=dtype)
    _, captured = capture_tiny(tiny_config(family), dtype)
    graph_module = captured.graph_module
    steps = [[9, 1, 4], [1]]  # the same graph for any number of tokens, down to one
    plain = [run_step(graph_module, model, captured, step) for step in steps]
    truth = [run_step(graph_module, model, captured, step, in_double=True) for step in steps]

    reports = pipeline.run(graph_module, PassesConfig(), captured.facts.expected_matches)

    assert matches(reports) == MATCHES[family]
    assert_proved(reports)
    left = ops(graph_module)
    assert not GONE.intersection(left)
    assert left["transpose"] < left["paged_attention"], (
        "only rotary tables may be turned, not each layer's heads"
    )
    assert left["rope_kv_write"] + left["kv_write"] == left["paged_attention"]
    decode = deepcopy(graph_module)
    reports = pipeline.run_decode_plan(decode, PassesConfig(), reports)
    assert matches(reports) == DECODE_MATCHES[family]
    assert_proved(reports)
    assert not {"linear", "silu_mul", "rope_kv_write"}.intersection(ops(decode))
    assert ops(decode)["paged_attention"] == left["kv_write"], "only unrotated queries keep their attention"
    for module in (graph_module, decode):
        for step, wants, truths in zip(steps, plain, truth, strict=True):
            for got, want, true in zip(run_step(module, model, captured, step), wants, truths, strict=True):
                assert_within_budget(got, true, want)


def matches(reports):
    counts: Counter[str] = Counter()
    for report in reports:
        counts[report.name] += report.matched
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count and name not in TIDYING)


def assert_proved(reports):
    for report in reports:
        assert not report.matched or report.name in TIDYING or report.proofs, f"{report.name} proved nothing"
