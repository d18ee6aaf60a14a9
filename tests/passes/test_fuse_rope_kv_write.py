"""Rotation and KV write as one op, in every layout; the write is never lost nor misplaced (case B21)."""

import pytest
import torch

from ostinato.ops import kv_write, paged_attention, rms_norm
from ostinato.passes.fuse_rope_kv_write import FuseRopeKVWrite
from ostinato.passes.remove_noops import RemoveNoops
from tests.support.attention_graphs import (
    TOKENS,
    D,
    attention,
    cohere_rope,
    ernie_rope,
    glm_rope,
    halves,
    llama_rope,
    make_inputs,
    olmo_rope,
    partial_rope,
)
from tests.support.graphs import assert_fuses, assert_refuses, ops, trace

LAYOUTS = {
    "llama": (attention(llama_rope), D),
    "partial": (attention(partial_rope), 4),
    "partial of everything": (attention(partial_rope), D),
    "glm": (attention(glm_rope, repeats=True), 8),
    "olmo": (attention(olmo_rope, table_type=torch.float32), D),
    "cohere": (attention(cohere_rope, table="neighbours"), D),
    "ernie": (attention(ernie_rope, repeats=True), D),
    "tokens before heads": (attention(llama_rope, heads_dim=2), D),
    "tables for each": (attention(llama_rope, own_tables=True), D),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fuses_every_layout_and_writes_the_same_cache(layout, dtype):
    function, rotated = LAYOUTS[layout]
    graph = assert_fuses(
        FuseRopeKVWrite(), function, make_inputs(dtype, rotated=rotated), None, tokens_dim=TOKENS
    )
    left = ops(graph)
    assert (left["rope_kv_write"], left["paged_attention"]) == (1, 1)
    assert not {"kv_write", "neg", "stack", "flatten", "add"} & left.keys()


def test_arguments_of_the_op_are_the_tables_and_layout_of_the_graph():
    graph = trace(attention(glm_rope, repeats=True), *make_inputs(rotated=8)(5), tokens_dim=TOKENS)
    FuseRopeKVWrite()(graph)
    (node,) = [n for n in graph.graph.nodes if "rope_kv_write" in str(n.target)]
    shapes = [tuple(a.meta["val"].shape[1:]) for a in node.args[:5]]
    assert shapes == [(4, 16), (2, 16), (2, 12), (8,), (8,)]
    assert node.args[8:] == (None, None, 0.0, 0.0, False, True)


def test_queries_and_keys_that_feed_it_are_views_of_the_projections():
    graph = trace(attention(llama_rope), *make_inputs()(5), tokens_dim=TOKENS)
    FuseRopeKVWrite()(graph)
    RemoveNoops()(graph)
    (node,) = [n for n in graph.graph.nodes if "rope_kv_write" in str(n.target)]
    chains = [(str(a.target), a.args[0].op) for a in node.args[:3]]
    assert chains == [("aten.select.int", "placeholder")] * 3


def test_two_layers_match_each_with_its_own_attention():
    first, second = attention(llama_rope), attention(llama_rope)

    def layers(q, k, v, angles, k1, v1, slots, tables, lengths, starts, k2, v2):
        out = first(q, k, v, angles, k1, v1, slots, tables, lengths, starts)
        return out, second(q * 2, k * 2, v * 2, angles, k2, v2, slots, tables, lengths, starts)

    def make(tokens):
        inputs = make_inputs()(tokens)
        return [*inputs, inputs[4].clone(), inputs[5].clone()]

    graph = trace(layers, *make(5), tokens_dim=TOKENS)
    report = FuseRopeKVWrite()(graph)
    assert report.matched == 2
    assert len(report.proofs) == 1, "equal layers are proved once"
    ours, plain = make(6), make(6)
    for a, b in zip(ours, plain, strict=True):
        b.copy_(a)
    for got, want in zip(graph(*ours), layers(*plain), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, want)


def refuses(function, reason, make=None):
    tensors = (make or make_inputs())(5)
    assert_refuses(FuseRopeKVWrite(), function, tensors, {reason: 1}, tokens_dim=TOKENS)


def test_keys_without_rotation_are_refused():
    refuses(attention(lambda x, cos, sin: x), "the keys are not rotated")


def test_a_norm_after_the_rotation_is_refused():
    def hunyuan(x, cos, sin):
        return rms_norm.OP(llama_rope(x, cos, sin), torch.ones(D), 1e-6, 0.0, True)

    refuses(attention(hunyuan), "the keys are normed after the rotation, or not rotated")


def test_a_write_that_no_attention_reads_is_refused():
    def only_write(k, v, k_cache, v_cache, slots):
        kv_write.OP(k, v, k_cache, v_cache, slots)
        return k + 1

    _, k, v, _, k_cache, v_cache, slots, *_ = make_inputs()(5)
    tensors = [k[0], v[0], k_cache, v_cache, slots]
    reason = "no attention reads the written keys"
    assert_refuses(FuseRopeKVWrite(), only_write, tensors, {reason: 1}, tokens_dim={0: 0, 1: 0, 4: 0})


def test_tables_that_are_given_are_refused():
    reason = "cannot see that halves of the cos table are equal"
    refuses(attention(llama_rope, table="given"), reason, make_inputs(table="given"))


def test_the_other_direction_of_rotation_is_refused():
    refuses(attention(lambda x, cos, sin: x * cos - halves(x) * sin), "sub where the pattern has add")


def test_rotating_the_other_half_is_refused():
    def nanochat(x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin

    refuses(attention(nanochat), "slice where the pattern has neg")


def test_keys_that_are_read_elsewhere_too_are_refused():
    def layer(q, k, v, angles, k_cache, v_cache, slots, tables, lengths, starts):
        table = torch.cat((angles, angles), -1)
        cos, sin = table.cos().unsqueeze(1), table.sin().unsqueeze(1)
        q, k = llama_rope(q.transpose(1, 2), cos, sin), llama_rope(k.transpose(1, 2), cos, sin)
        kv_write.OP(k.transpose(1, 2)[0], v[0], k_cache, v_cache, slots)
        return paged_attention.OP(
            q.transpose(1, 2)[0], k_cache, v_cache, tables, lengths, starts, 1.0, 0, 0.0
        ), k

    refuses(layer, "the intermediate result of add is used elsewhere too")
