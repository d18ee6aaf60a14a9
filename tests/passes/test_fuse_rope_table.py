"""Rotary tables become one op, whatever their type and scaling; other tables stay and say why."""

import pytest
import torch

from ostinato.passes.fuse_rope_table import FuseRopeTable
from tests.support.graphs import assert_fuses, assert_refuses, ops, trace


def tables(dtype, scaling=1.0, *, is_outer=False):
    def function(positions, inv_freq):
        ids = positions[None]
        if is_outer:  # as transformers wrote it before it broadcast
            angles = (inv_freq[None, :, None] @ ids[:, None, :].float()).transpose(1, 2)
        else:
            angles = ids[..., None].float() * inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)

    return function


def make(tokens):
    return [torch.arange(tokens) * 911, 1.0 / 10_000.0 ** (torch.arange(8) / 8)]


@pytest.mark.parametrize("is_outer", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 1.2079441])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fuses_every_type_and_scaling(dtype, scaling, is_outer):
    function = tables(dtype, scaling, is_outer=is_outer)
    graph = assert_fuses(FuseRopeTable(), function, make, {"rope_table": 1, "getitem": 2, "unsqueeze": 2})
    (op,) = [node for node in graph.graph.nodes if "rope_table" in str(node.target)]
    assert op.args[2:] == (scaling, dtype)
    for got, want in zip(graph(*make(5)), function(*make(5)), strict=True):
        assert torch.equal(got, want)


def test_two_tables_of_one_kind_of_positions_both_fuse():
    def function(positions, inv_freq):
        ids = positions[None][..., None].float()
        results = []
        for frequencies in (inv_freq, inv_freq):
            angles = ids * frequencies
            both = torch.cat((angles, angles), dim=-1)
            results += [both.cos(), both.sin()]
        return results

    wanted = {"rope_table": 2, "getitem": 4, "unsqueeze": 4}
    assert_fuses(FuseRopeTable(), function, make, wanted, matches=2)


def near_neighbours(positions, inv_freq):
    angles = (positions[None][..., None].float() * inv_freq).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def near_one_half(positions, inv_freq):
    angles = positions[None][..., None].float() * inv_freq
    return angles.cos(), angles.sin()


def near_unlike_halves(positions, inv_freq):
    angles = positions[None][..., None].float() * inv_freq
    both = torch.cat((angles, angles * 2), dim=-1)
    return both.cos(), both.sin()


def near_unlike_scaling(positions, inv_freq):
    angles = positions[None][..., None].float() * inv_freq
    both = torch.cat((angles, angles), dim=-1)
    return both.cos() * 1.5, both.sin() * 1.25


def near_computed(positions, inv_freq):
    longest = positions.max().float()
    return tables(torch.float32)(positions, inv_freq / (1 + longest / 1000))


def near_shared_angles(positions, inv_freq):
    angles = positions[None][..., None].float() * inv_freq
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin(), both


def near_cosine_alone(positions, inv_freq):
    angles = positions[None][..., None].float() * inv_freq
    return torch.cat((angles, angles), dim=-1).cos()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (near_neighbours, "each frequency stands twice side by side, not in both halves"),
        (near_one_half, "the cosine is not taken of angles in both halves of a row"),
        (near_unlike_halves, "mul where the pattern reads its mul again"),
        (near_unlike_scaling, "scaling is 1.5 in one place and 1.25 in another"),
        (near_computed, "the frequencies are computed in the graph"),
        (near_shared_angles, "the intermediate result of cat is used elsewhere too"),
        (near_cosine_alone, "cat is used by cos, not by sin"),
    ],
)
def test_near_misses_are_refused_and_untouched(function, reason):
    assert_refuses(FuseRopeTable(), function, make(5), {reason: 1})


def test_float64_frequencies_are_refused():
    tensors = [torch.arange(5), torch.rand(8).double()]
    assert_refuses(FuseRopeTable(), tables(torch.float32), tensors, {"inv_freq is float64, not float32": 1})


def test_int32_positions_are_refused():
    tensors = [torch.arange(5, dtype=torch.int32), torch.rand(8)]
    assert_refuses(FuseRopeTable(), tables(torch.float32), tensors, {"positions is int32, not int64": 1})


def test_a_graph_without_tables_stays():
    graph = trace(lambda x: x.sin(), torch.randn(5, 8))
    report = FuseRopeTable()(graph)
    assert (report.matched, report.refused, ops(graph)) == (0, {}, {"sin": 1})
