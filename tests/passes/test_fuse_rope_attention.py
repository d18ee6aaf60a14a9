"""Rotation, KV write and attention of one layer become one op where nothing else needs what lies between."""

from functools import partial

import pytest
import torch

from ostinato.ops import kv_write, paged_attention, rope_kv_write
from ostinato.passes.fuse_rope_attention import FuseRopeAttention
from tests.support.attention_graphs import BLOCK, D, E, G, H
from tests.support.graphs import assert_fuses as assert_fuses_layers
from tests.support.graphs import assert_refuses

TOKENS = {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 7: 0}


def make(dtype=torch.float32, *, rotated=D, num_layers=1, v_size=E):
    """q, k, v, cos, sin, planes, slots, tables, lengths, starts, norm weights, sinks, more layers' planes."""

    def planes():
        return [torch.zeros(4, BLOCK, G, size, dtype=dtype) for size in (D, v_size)]

    def tensors(tokens):
        angles = torch.randn(tokens, rotated // 2).repeat(1, 2)
        return [
            *(torch.randn(tokens, *size).to(dtype) for size in ((H, D), (G, D), (G, v_size))),
            *(angles.cos().to(dtype), angles.sin().to(dtype)),
            *planes(),
            torch.arange(tokens),
            torch.arange(4, dtype=torch.int32)[None],
            torch.tensor([tokens], dtype=torch.int32),
            torch.tensor([0, tokens], dtype=torch.int32),
            *(torch.randn(D).to(dtype), torch.randn(D).to(dtype), torch.randn(H).to(dtype)),
            *(plane for _ in range(num_layers - 1) for plane in planes()),
        ]

    return tensors


def write(given, *, norm=False, interleaved=False):
    """The rotated queries of a layer, given the tensors that `make` makes."""
    weights = (*given[11:13], 1e-6, 1.0, True) if norm else (None, None, 0.0, 0.0, False)
    return rope_kv_write.OP(*given[:8], *weights, interleaved)


def attend(q, given, *, scale=0.25, window=0, softcap=0.0, sinks=None):
    return paged_attention.OP(q, *given[5:7], *given[8:11], scale, window, softcap, sinks)


def layer(*given, norm=False, interleaved=False, with_sinks=False, **numbers):
    q = write(given, norm=norm, interleaved=interleaved)
    return attend(q, given, sinks=given[13] if with_sinks else None, **numbers)


def assert_fuses(function, make_tensors, want, **options):
    return assert_fuses_layers(
        FuseRopeAttention(), function, make_tensors, want, tokens_dim=TOKENS, **options
    )


def refuses(function, reason, make_tensors=None):
    tensors = (make_tensors or make())(5)
    assert_refuses(FuseRopeAttention(), function, tensors, {reason: 1}, tokens_dim=TOKENS)


KINDS = {
    "plain": {},
    "norm_window": {"norm": True, "window": 3},
    "interleaved_softcap": {"interleaved": True, "softcap": 20.0, "scale": 0.3},
    "sinks": {"with_sinks": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_calls_become_one_with_all_that_they_had(kind, dtype):
    options = KINDS[kind]
    rotated = 6 if kind == "plain" else D
    graph = assert_fuses(partial(layer, **options), make(dtype, rotated=rotated), {"rope_attention": 1})
    (op,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = [getattr(value, "name", value) for value in op.args]
    norm, sinks = "norm" in options, "with_sinks" in options
    given = [f"tensors_{place}" for place in range(14)]
    weights = [*given[11:13], 1e-6, 1.0, True] if norm else [None, None, 0.0, 0.0, False]
    numbers = [options.get("scale", 0.25), options.get("window", 0), options.get("softcap", 0.0)]
    assert names[:20] == [*given[:8], *weights, "interleaved" in options, *given[8:11], *numbers]
    assert names[20:] in ([given[13]] if sinks else [None], [] if not sinks else None)


def test_each_layer_fuses_over_its_own_planes():
    def layers(*given):
        first = layer(*given)
        return first, layer(*given[:5], *given[14:16], *given[7:14], window=3)

    assert_fuses(layers, make(num_layers=2), {"rope_attention": 2}, matches=2)


def test_a_later_layer_that_reads_the_same_planes_stays_as_it_is_and_reads_what_was_written():
    def layers(*given):
        first = layer(*given)
        return first, attend(given[0] * 2, given)

    assert_fuses(layers, make(), {"rope_attention": 1, "mul": 1, "paged_attention": 1})


def test_a_reader_of_the_planes_in_between_reads_the_same():
    def layers(*given):
        q = write(given)
        between = attend(given[0] * 2, given)
        return attend(q, given), between, given[5].sum()

    assert_fuses(layers, make(), {"rope_attention": 1, "mul": 1, "paged_attention": 1, "sum": 1})


def second_user(*given):
    q = write(given)
    return attend(q, given), q.exp()


def two_attentions(*given):
    q = write(given)
    return attend(q, given), attend(q, given, window=2)


def returned(*given):
    q = write(given)
    return attend(q, given), q


def read_in_part(*given):
    return attend(write(given)[:, ::2], given)


def unread(*given):
    write(given)
    return given[0] * 2


@pytest.mark.parametrize(
    ("function", "readers"),
    [
        (second_user, "exp and paged_attention"),
        (two_attentions, "paged_attention"),
        (returned, "output and paged_attention"),
        (read_in_part, "slice"),
        (unread, "nothing"),
    ],
)
def test_queries_with_another_reader_are_refused_and_untouched(function, readers):
    refuses(function, f"the rotated queries are read by {readers}, not by attention alone")


def test_planes_that_another_layer_wrote_are_refused():
    def shared(*given):
        kv_write.OP(*given[1:3], *given[14:16], given[7])
        return attend(write(given), (*given[:5], *given[14:16], *given[7:14]))

    def one_shared(*given):
        return attend(write(given), (*given[:6], given[15], *given[7:14]))

    for function in (shared, one_shared):
        refuses(function, "the attention reads other planes than those written", make(num_layers=2))


def test_keys_that_are_read_as_values_are_refused():
    def swapped(*given):
        return attend(write(given), (*given[:5], given[6], given[5], *given[7:14]))

    refuses(swapped, "the attention reads other planes than those written", make(v_size=D))


def write_again(given):
    kv_write.OP(given[1] * 2, given[2], *given[5:7], given[7])


def write_a_view(given):
    given[6][:2].mul_(2)


def write_the_lengths(given):
    given[9][:1].sub_(1)


@pytest.mark.parametrize(
    ("writes", "op"), [(write_again, "kv_write"), (write_a_view, "mul_"), (write_the_lengths, "sub_")]
)
def test_a_write_to_planes_or_step_in_between_is_refused(writes, op):
    def function(*given):
        q = write(given)
        writes(given)
        return attend(q, given)

    refuses(function, f"{op} writes an input in between")


def test_writes_before_and_after_the_two_are_none_of_its_business():
    def function(*given):
        write_again(given)
        out = layer(*given)
        write_a_view(given)
        return out

    assert_fuses(function, make(), None)


@pytest.mark.parametrize("place", [7, 8, 10], ids=["slots", "tables", "starts"])
def test_slots_and_tables_that_the_graph_computes_are_refused(place):
    def function(*given):
        return layer(*given[:place], given[place] * 2, *given[place + 1 :])

    refuses(function, "slots or block tables are not those of the step")


def test_a_sink_that_is_computed_after_the_write_is_refused():
    def function(*given):
        q = write(given)
        return attend(q, given, sinks=given[13] * 2)

    refuses(function, "an input is computed after the result is used")


def test_other_attentions_and_writes_are_none_of_its_business():
    def function(*given):
        kv_write.OP(*given[1:3], *given[5:8])
        return attend(given[0] * 2, given)

    assert_refuses(FuseRopeAttention(), function, make()(5), {}, tokens_dim=TOKENS)
