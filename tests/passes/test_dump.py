"""Dumps: one readable file before and one after each pass, the second headed by what changed."""

import torch
import torch.nn.functional as F

from ostinato.passes.dump import Dump
from ostinato.passes.fuse_silu_mul import FuseSiluMul
from tests.support.graphs import trace


def test_files_are_named_by_place_and_pass_and_say_what_changed(tmp_path):
    graph_module = trace(lambda gate, up: F.silu(gate) * up, *torch.randn(2, 5, 8), tokens_dim={0: 0, 1: 0})
    dump = Dump(str(tmp_path / "made" / "here"))
    dump.before(3, "silu_mul", graph_module)
    FuseSiluMul()(graph_module)
    dump.after(3, "silu_mul", graph_module)
    before, after = (dump.folder / f"03_silu_mul.{when}.py" for when in ("before", "after"))
    assert sorted(dump.folder.iterdir()) == [after, before]
    assert after.read_text().splitlines()[:3] == [
        "# aten.mul.Tensor: 1 -> 0",
        "# aten.silu.default: 1 -> 0",
        "# ostinato.silu_mul.default: 0 -> 1",
    ]
    assert "torch.ops.aten.silu.default(" in before.read_text()
    assert "torch.ops.ostinato.silu_mul.default(" in after.read_text()
    assert "torch.ops.aten.silu.default(" not in after.read_text()


def test_a_pass_that_changes_nothing_says_so_and_an_older_dump_is_replaced(tmp_path):
    graph_module = trace(lambda x: x.exp(), torch.randn(5, 8))
    (tmp_path / "12_silu_mul.after.py").write_text("of an earlier run")
    dump = Dump(str(tmp_path))
    dump.before(12, "silu_mul", graph_module)
    dump.after(12, "silu_mul", graph_module)
    lines = (tmp_path / "12_silu_mul.after.py").read_text().splitlines()
    assert lines[0] == "# nothing changed"
    assert lines[1:] == (tmp_path / "12_silu_mul.before.py").read_text().splitlines()
