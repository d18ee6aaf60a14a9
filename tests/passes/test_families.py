"""Whole models: every construct of every family is fused, and the arithmetic stays what it was."""

from collections import Counter

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

    matched: Counter[str] = Counter()
    for report in reports:
        matched[report.name] += report.matched
    tidying = {"remove_noops", "remove_duplicates"}
    assert ", ".join(f"{n} {c}" for n, c in matched.items() if c and n not in tidying) == MATCHES[family]
    for report in reports:
        assert not report.matched or report.name in tidying or report.proofs, f"{report.name} proved nothing"
    left = ops(graph_module)
    assert not GONE.intersection(left)
    assert left["transpose"] < left["paged_attention"], (
        "only rotary tables may be turned, not each layer's heads"
    )
    assert left["rope_kv_write"] + left["kv_write"] == left["paged_attention"]
    for step, wants, truths in zip(steps, plain, truth, strict=True):
        for got, want, true in zip(run_step(graph_module, model, captured, step), wants, truths, strict=True):
            assert_within_budget(got, true, want)
