"""The decode plan as a whole: counts, expectations, names that are off, fuel that goes on, dumps."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from ostinato.errors import CompileError, ConfigError
from ostinato.ops import paged_attention, rope_kv_write
from ostinato.passes import pipeline
from ostinato.passes.config import PassesConfig
from tests.support.attention_graphs import TOKENS, attention, llama_rope, make_inputs
from tests.support.graphs import name_weights, ops, trace

PLAN = {"skinny_linear": 7, "skinny_gated": 2, "skinny_residual": 4, "skinny_norm": 3}


def norm(x, scale):
    wide = x.float()
    return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def model(x, scale, out, gate_up, down, logits, rows):
    """Two layers whose attention is `tanh`, and logits of some rows."""
    for _ in range(2):
        x = x + F.linear(torch.tanh(x), out)
        gate, up = F.linear(norm(x, scale), gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, down)
    return F.linear(norm(x, scale)[:, rows], logits)


def inputs(tokens):
    shapes = [(1, tokens, 16), (16,), (16, 16), (48, 16), (16, 24), (30, 16)]
    seed = torch.Generator().manual_seed(5)
    return [*(torch.randn(shape, generator=seed) for shape in shapes), torch.tensor([tokens - 1, 0])]


def run(function=model, **settings):
    graph = trace(function, *inputs(5), tokens_dim={0: 1}, clean=False)
    name_weights(graph, 1, 2, 3, 4, 5)
    config = PassesConfig(**settings)
    before = pipeline.run(graph, config, {})
    decode = deepcopy(graph)
    return graph, decode, before, pipeline.run_decode_plan(decode, config, before)


def counts(reports):
    return {report.name: report.matched for report in reports if report.name in PLAN}


def test_every_construct_is_taken_up_and_computes_the_same():
    graph, decode, _, reports = run()
    assert counts(reports) == PLAN
    assert {report.name: report.expected for report in reports if report.expected} == PLAN
    assert ops(decode) == {"tanh": 2, "skinny_linear": 5, "skinny_gated": 2, "index": 1}
    assert ops(graph)["linear"] == 7, "the plan is made on a copy"
    for tokens in (5, 1, 16, 20):
        torch.testing.assert_close(decode(*inputs(tokens))[0], model(*inputs(tokens)))


def test_too_few_matches_fail_and_tell_the_reasons_and_a_way_on():
    def function(x, scale, out, gate_up, down, logits, rows):
        y = F.linear(x, gate_up)
        return F.silu(y[..., :20]) * y[..., 20:40]

    message = r"skinny_gated matched 0 of 1 expected .*not the first and the second.*passes\.off=skinny_gated"
    with pytest.raises(CompileError, match=message):
        run(function)


def test_a_gate_behind_up_is_refused_but_not_expected():
    def function(x, scale, out, gate_up, down, logits, rows):
        up, gate = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    _, decode, _, reports = run(function)
    assert {r.name: r.refused for r in reports if r.refused} == {
        "skinny_gated": {"gate and up are not the first and the second half": 1}
    }
    assert ops(decode) == {"skinny_linear": 1, "chunk": 1, "getitem": 2, "silu_mul": 1}


@pytest.mark.parametrize(
    ("off", "left"),
    [
        ("skinny_norm", {"skinny_linear": 7, "skinny_gated": 2, "skinny_residual": 4}),
        ("skinny_residual", {"skinny_linear": 7, "skinny_gated": 2, "skinny_norm": 0}),
        ("skinny_linear", {"skinny_gated": 0, "skinny_residual": 0, "skinny_norm": 0}),
        ("silu_mul", {**PLAN, "skinny_gated": 0}),
    ],
)
def test_what_is_off_does_nothing_and_its_dependents_expect_nothing(off, left):
    _, decode, _, reports = run(off=(off,))
    assert counts(reports) == left
    torch.testing.assert_close(decode(*inputs(5))[0], model(*inputs(5)))


def run_attention(function, **settings):
    graph = trace(function, *make_inputs()(5), tokens_dim=TOKENS, clean=False)
    config = PassesConfig(**settings)
    reports = pipeline.run_decode_plan(graph, config, pipeline.run(graph, config, {}))
    (report,) = [r for r in reports if r.name == "rope_attention"] or [None]
    return ops(graph), report


def test_attention_takes_up_the_rotated_write_of_its_planes():
    left, report = run_attention(attention(llama_rope))
    assert (report.matched, report.expected) == (1, 1)
    assert (left["rope_attention"], left["rope_kv_write"], left["paged_attention"]) == (1, 0, 0)


def test_keys_that_are_not_rotated_are_not_expected_to_be_taken_up():
    left, report = run_attention(attention(lambda x, cos, sin: x))
    assert (report.matched, report.expected, report.refused) == (0, None, {})
    assert (left["kv_write"], left["paged_attention"]) == (1, 1)


@pytest.mark.parametrize("off", ["rope_attention", "rope_kv_write"])
def test_attention_stays_where_its_pass_or_that_of_the_rotation_is_off(off):
    left, report = run_attention(attention(llama_rope), off=(off,))
    assert report is None or (report.matched, report.expected) == (0, None)
    assert left["paged_attention"] == 1


def test_a_write_between_rotation_and_attention_fails_the_plan_with_its_reason():
    def function(q, k, v, cos, sin, k_cache, v_cache, slots, tables, lengths, starts):
        args = q, k, v, cos, sin, k_cache, v_cache, slots, None, None, 0.0, 0.0, False, False
        turned = rope_kv_write.OP(*args)
        v_cache[:2].mul_(2)
        return paged_attention.OP(turned, k_cache, v_cache, tables, lengths, starts, 0.25, 0, 0.0)

    q, k, v, angles, *rest = make_inputs()(5)
    tables = [angles[0].repeat(1, 2).cos(), angles[0].repeat(1, 2).sin()]
    graph = trace(function, q[0], k[0], v[0], *tables, *rest, tokens_dim={0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 7: 0})
    message = r"rope_attention matched 0 of 1 .*mul_ writes an input in between.*passes\.off=rope_attention"
    with pytest.raises(CompileError, match=message):
        pipeline.run_decode_plan(graph, PassesConfig(), [])


def test_names_of_both_lists_are_known_to_both():
    with pytest.raises(ConfigError, match=r"passes\.off=skinny: no such pass; known: .*skinny_gated"):
        run(off=("skinny",))


def test_fuel_goes_on_where_the_ordinary_passes_left_it_and_any_amount_is_right():
    _, _, before, plan = run()
    spent, total = (sum(report.matched for report in reports) for reports in (before, plan))
    wanted = model(*inputs(5))
    for extra in (-1, 0, 1, 8, 10, 13, total - 1, total):
        _, decode, _, reports = run(fuel=spent + extra)
        assert sum(report.matched for report in reports) == max(extra, 0)
        torch.testing.assert_close(decode(*inputs(5))[0], wanted)


def test_reports_are_heard_as_they_are_made():
    graph = trace(model, *inputs(5), tokens_dim={0: 1})
    heard = []
    assert pipeline.run_decode_plan(graph, PassesConfig(), [], on_pass=heard.append) == heard


def test_dumps_are_numbered_on(tmp_path):
    run(dump_dir=str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    first = len(pipeline.pipeline())
    assert f"{first:02}_skinny_linear.after.py" in names
    assert len(names) == 2 * (first + len(pipeline.decode_plan()))


def test_every_pass_states_its_name_and_numeric_class():
    for rewrite in pipeline.decode_plan():
        assert rewrite.numerics in ("exact", "close")
        assert set(rewrite.needs) <= set(pipeline.known_passes())
