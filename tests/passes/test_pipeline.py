"""The whole list: names, expectations, fuel, dumps, the table, and a binary search by fuel."""

import pytest
import torch
import torch.nn.functional as F

from ostinato.errors import CompileError, ConfigError
from ostinato.passes import pipeline
from ostinato.passes.base import PassReport
from ostinato.passes.config import PassesConfig
from tests.support.graphs import ops, trace


def model(x, weight):
    for _ in range(2):
        wide = x.float()
        normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        gate, up = normed.chunk(2, dim=-1)
        x = x + torch.cat((F.silu(gate) * up, up), dim=-1)
    return x


def traced():
    return trace(model, torch.randn(5, 16), torch.randn(16), clean=False)


def run(expected=None, **settings):
    graph = traced()
    return graph, pipeline.run(graph, PassesConfig(**settings), expected or {})


def test_everything_on_reaches_what_is_expected():
    expected = {"rms_norm": 2, "add_rms_norm": 1, "silu_mul": 2}
    graph, reports = run(expected)
    assert {r.name: r.matched for r in reports if r.name in expected} == expected
    assert {r.name: r.expected for r in reports if r.expected is not None} == expected
    assert ops(graph)["rms_norm"] == 1
    x, weight = torch.randn(3, 16), torch.randn(16)
    torch.testing.assert_close(graph(x, weight)[0], model(x, weight))


def test_too_few_matches_fail_and_tell_the_reasons_and_a_way_on():
    message = (
        r"silu_mul matched 2 of 3 expected places \(nothing looked like it\); "
        r"gelu_tanh_mul matched 0 of 1 .*passes\.off=silu_mul,gelu_tanh_mul"
    )
    with pytest.raises(CompileError, match=message):
        run({"silu_mul": 3, "gelu_tanh_mul": 1})


def test_refusals_are_told_when_too_few_match():
    graph = trace(lambda g, u: F.silu(g) + u, torch.randn(5, 16), torch.randn(5, 16), tokens_dim={0: 0, 1: 0})
    with pytest.raises(CompileError, match=r"\(1 x silu is used by add, not by mul\)"):
        pipeline.run(graph, PassesConfig(), {"silu_mul": 1})


def test_more_matches_than_expected_are_fine():
    _, reports = run({"silu_mul": 1})
    assert [r.matched for r in reports if r.name == "silu_mul"] == [2]


def test_a_pass_that_is_off_does_nothing_and_expects_nothing():
    graph, reports = run({"silu_mul": 2}, off=("silu_mul",))
    assert "silu_mul" not in {r.name for r in reports}
    assert ops(graph)["silu"] == 2


def test_what_needs_a_pass_that_is_off_expects_nothing_either():
    graph, _ = run({"rms_norm": 2, "add_rms_norm": 1}, off=("rms_norm",))
    assert (ops(graph)["rsqrt"], ops(graph)["add_rms_norm"]) == (2, 0)


def test_nothing_is_expected_without_the_clean_up():
    run({"rms_norm": 2, "silu_mul": 2}, off=("remove_noops",))


def test_all_off_leaves_the_graph_untouched():
    before = traced().code
    graph, reports = run(off=pipeline.known_passes())
    assert (graph.code, reports) == (before, [])


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"passes\.off=silu_mull: no such pass; known: remove_noops, merge_lin"
    ):
        run(off=("silu_mull",))
    with pytest.raises(CompileError, match="matches are expected of moe, which is no pass"):
        run({"moe": 1})


def test_no_fuel_changes_nothing_and_expects_nothing():
    before = traced().code
    graph, reports = run({"silu_mul": 2}, fuel=0)
    assert graph.code == before
    assert sum(r.matched for r in reports) == 0


def test_each_unit_of_fuel_makes_one_match_and_any_amount_is_right():
    _, reports = run()
    total = sum(r.matched for r in reports)
    x, weight = torch.randn(3, 16), torch.randn(16)
    for fuel in (1, 5, total - 1, total, total + 9):
        graph, reports = run(fuel=fuel)
        assert sum(r.matched for r in reports) == min(fuel, total)
        torch.testing.assert_close(graph(x, weight)[0], model(x, weight))


def test_a_binary_search_over_fuel_names_the_guilty_match():
    def made(fuel):
        return ops(run(fuel=fuel)[0])["silu_mul"]

    low, high = 0, 64  # as if the first fused gate were wrong: without it at low, with it at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if made(middle) else (middle, high)
    before, after = (run(fuel=fuel)[1] for fuel in (low, high))
    changed = [a.name for a, b in zip(after, before, strict=True) if a.matched != b.matched]
    assert changed == ["silu_mul"]


def test_reports_are_heard_as_they_are_made():
    heard: list[PassReport] = []
    reports = pipeline.run(traced(), PassesConfig(), {}, on_pass=heard.append)
    assert heard == reports


def test_dumps_are_readable_and_head_the_operators_that_changed(tmp_path):
    run(dump_dir=str(tmp_path / "graphs"))
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert [n for n in names if "silu_mul" in n] == ["04_silu_mul.after.py", "04_silu_mul.before.py"]
    after = (tmp_path / "graphs" / "04_silu_mul.after.py").read_text()
    assert "# ostinato.silu_mul.default: 0 -> 2\n" in after
    assert "# aten.silu.default: 2 -> 0\n" in after
    assert "torch.ops.ostinato.silu_mul.default(" in after
    compile(after, "after.py", "exec")
    untouched = (tmp_path / "graphs" / "05_gelu_tanh_mul.after.py").read_text()
    assert untouched.startswith("# nothing changed\n")


def test_the_table_has_a_line_for_each_pass_and_spells_out_refusals():
    reports = [
        PassReport("silu_mul", 2, {}, 0.0123, expected=2),
        PassReport("rms_norm", 0, {"no weight": 3, "odd eps": 1}, 0.001),
    ]
    assert pipeline.format_table(reports).splitlines() == [
        "pass      matched  expected  refused  proofs  ms",
        "silu_mul        2         2                   12",
        "rms_norm        0                  4           1",
        "rms_norm refused 3 x no weight; 1 x odd eps",
    ]


def test_every_pass_states_its_name_and_numeric_class():
    for rewrite in pipeline.pipeline():
        assert rewrite.numerics in ("exact", "close")
        assert set(rewrite.needs) <= set(pipeline.known_passes())
