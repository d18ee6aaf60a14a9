"""`ostinato inspect` of a tiny artifact: report, one layer of the graph, switches that do not go together."""

import pytest

from ostinato.tools.main import main


def test_the_report_holds_what_the_manifest_says(tiny_artifact, capsys):
    assert main(["inspect", str(tiny_artifact), "--verify", "--weights"]) == 0
    out = capsys.readouterr().out
    for piece in ("LlamaForCausalLM from model, float32", "silu_mul", "verified: ", "lm_head"):
        assert piece in out
    row = next(line.split() for line in out.splitlines() if line.startswith("rope_kv_write"))
    assert row[1:3] == ["2", "2"]  # matched, expected


def test_the_graph_after_the_passes_holds_the_fused_ops_of_one_layer(tiny_artifact, capsys):
    assert main(["inspect", str(tiny_artifact), "--graph", "after", "--layer", "1"]) == 0
    after = capsys.readouterr().out
    assert after.count("ostinato.rope_kv_write") == 1
    assert "layers_0_" not in after
    assert main(["inspect", str(tiny_artifact), "--graph", "before", "--layer", "all"]) == 0
    before = capsys.readouterr().out
    assert "ostinato.rope_kv_write" not in before
    assert before.count("ostinato.kv_write") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "1"], "--layer 1: only with --graph"),
        (["--graph", "after", "--layer", "first"], "--layer first: must be a layer number or all"),
        (["--json", "--verify"], "--json prints the manifest alone"),
    ],
)
def test_a_switch_without_effect_is_refused(tiny_artifact, capsys, words, message):
    assert main(["inspect", str(tiny_artifact), *words]) == 2
    assert message in capsys.readouterr().err
