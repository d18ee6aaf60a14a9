"""A decode step, made of its ops: which way for which layer, found by racing whole steps.

    python -m benchmarks.gpu_step_ways [--models llama-8b smollm2-135m] [--tokens 1 8 32 ...] [--write]

What wins the race of one layer against itself (gpu_linears --tune) need not win a step: a tile's block has a
multiprocessor for itself, Triton's kernels want L1, and each kernel begins when the one before lets it.  So
steps race as wholes at a context of 544, norms, rotation and attention included.  From the table's choices,
and from the first tile of each layer, one layer after the other takes whichever of its ways makes the step
fastest, twice around.  L1 is split as the engine would (`share_of_l1`).  `--write` puts the fastest into
ops/tuned/<gpu>.json, as the choices for so many tokens; a layer's own race no longer overrules them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_attention import CONTEXT
from benchmarks.gpu_attention import MODELS as ATTENTION
from benchmarks.gpu_attention import step as attention_step
from benchmarks.gpu_graphs import captured, race
from benchmarks.gpu_linears import (
    candidates,
    key_of,
    layer_graphs,
    make_tiles,
    read_choices,
    tuned_path,
    write_choices,
)
from benchmarks.linear_layers import EPS, MODELS, Bench, Layer, Model, ours, parts
from benchmarks.record import Row, write_record
from ostinato.ops import rope_attention, tuning
from ostinato.ops.kernel_store import STORE
from ostinato.ops.skinny_rows import Config
from ostinato.ops.wgmma_linear import Tile
from ostinato.runtime.gpu.gpu_model import share_of_l1

HEADS = {"llama-8b": ATTENTION["8b"], "smollm2-135m": ATTENTION["smol"]}

Way = Config | Tile | None  # None: the parts, by the library
Mix = tuple[Way, ...]  # of the layers, in their order
Times = Callable[[Sequence[Mix], int], list[list[float]]]  # milliseconds of so many rounds, for each mix


def ways(spec: Model, num_tokens: int) -> list[list[Way]]:
    """What each layer may take, the table's choice first."""
    table, made = read_choices(tuned_path()), []
    for layer in spec.layers.values():
        some = candidates(layer, num_tokens, table)
        now = table.get(key_of(layer, num_tokens), some[0])
        made.append(list(dict.fromkeys([now, *some, None])))
    return made


def descend(start: Mix, options: Sequence[Sequence[Way]], times: Times) -> Mix:
    """One layer after the other takes its best way, twice around."""
    best = start
    for _ in range(2):
        for at, some in enumerate(options):
            tried = [(*best[:at], way, *best[at + 1 :]) for way in some]
            took = [min(samples) for samples in times(tried, 3)]
            best = tried[took.index(min(took))]
    return best


def share(spec: Model, mix: Mix, num_tokens: int) -> int:
    """Of L1, in percent: what the engine would take."""
    if num_tokens > 1:
        return 100
    shapes = [
        tuning.Shape(layer.op.__name__.rpartition(".")[2], 1, layer.num_out, layer.width, "bfloat16")
        for layer in spec.layers.values()
    ]
    choices = [
        tuning.Choice(
            way._asdict() if isinstance(way, Config) else None,
            way._asdict() if isinstance(way, Tile) else None,
        )
        for way in mix
    ]
    return share_of_l1(shapes, dict(zip(shapes, choices, strict=True)))


def whole_step(name: str, bench: Bench, num_tokens: int) -> Callable[[Mix], Tensor]:
    """Runs a step of so many sequences by a mix."""
    spec, heads = MODELS[name], HEADS[name]
    layers = list(spec.layers.values())
    *block, head = layers
    weights, first = [], 0
    for _ in range(spec.num_layers):
        for layer in block:
            weights.append(bench.weights(layer, 1, first)[0])
            first += layer.num_rows * layer.width
    last = bench.weights(head, 1, first)[0]
    given = attention_step(heads, num_tokens, CONTEXT, 1)
    planes = [given.planes[at % len(given.planes)] for at in range(spec.num_layers)]
    slots = given.slots(CONTEXT - 1)
    embedded = torch.randn(num_tokens, block[0].width, device="cuda").bfloat16()
    cos, sin = (torch.randn(num_tokens, heads.size, device="cuda").bfloat16() for _ in range(2))
    widths = [count * heads.size for count in (heads.heads, heads.kv_heads, heads.kv_heads)]
    rest = (None, None, EPS, 0.0, True, False, given.tables, given.lengths, given.starts, given.scale, 0, 0.0)

    def attended(qkv: Tensor, at: int) -> Tensor:
        q, k, v = (part.view(num_tokens, -1, heads.size) for part in qkv.split(widths, 1))
        return rope_attention.OP(q, k, v, cos, sin, *planes[at], slots, *rest).view(num_tokens, -1)

    def run(mix: Mix) -> Tensor:
        def layer(which: int, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
            if mix[which] is None:
                return parts(layers[which], x, weight, bench.norm, residual)
            return ours(layers[which], x, weight, bench.norm, residual, mix[which])

        x, each = embedded, iter(weights)
        for at in range(spec.num_layers):
            x = layer(1, attended(layer(0, x, next(each), x), at), next(each), x)
            x = layer(3, layer(2, x, next(each), x), next(each), x)
        return layer(4, x, last, x)

    return run


def told(mix: Mix) -> str:
    return "".join("w" if isinstance(way, Tile) else "p" if way is None else "t" for way in mix)


def step_rows(name: str, bench: Bench, num_tokens: int) -> tuple[list[Row], Mix]:
    """Steps by the table, by what was found, and by one way for all; the best."""
    spec, run, options = MODELS[name], whole_step(name, bench, num_tokens), ways(MODELS[name], num_tokens)

    def times(some: Sequence[Mix], rounds: int) -> list[list[float]]:
        graphs = []
        for mix in some:
            STORE.carveout = share(spec, mix, num_tokens)
            graphs.append(captured(lambda: run(mix)))  # noqa: B023  # called at once
        return race(graphs, spec.num_bytes, rounds)

    now = tuple(some[0] for some in options)
    tiles = tuple(next(way for way in some if isinstance(way, Tile)) for some in options)
    pure = {"tiles": tiles, "parts": (None,) * len(options)}
    found = {"found": descend(now, options, times), "found_from_tiles": descend(tiles, options, times)}
    finals = {"table": now, **found, **pure}
    took = times(list(finals.values()), 21)
    ms = [statistics.median(samples) for samples in took]
    rows = [
        Row.of(f"gpu_step_{name}_t{num_tokens}_{label}_ms", samples, "ms", ms[0], f"table {told(now)}")
        for label, samples in zip(finals, took, strict=True)
    ]
    best = list(finals.values())[ms.index(min(ms))]
    print(f"{name} t{num_tokens}: {told(now)} {ms[0]:.3f} -> {told(best)} {min(ms):.3f}", *best, flush=True)
    return rows, best


def chosen(bench: Bench, layer: Layer, num_tokens: int, way: Way) -> dict[str, Any]:
    """A row of the table: how long the layer takes by itself, this way and others."""
    graphs, count = layer_graphs(bench, layer, num_tokens, [] if way is None else [way])
    us = [round(statistics.median(s) * 1e3 / count, 3) for s in race(graphs, count * layer.num_bytes, 7)]
    kind = {Tile: "tile", Config: "config"}.get(type(way))
    return {
        "op": layer.op.__name__.rpartition(".")[2],
        "tokens": num_tokens,
        "out": layer.num_out,
        "width": layer.width,
        "dtype": "bfloat16",
        **({} if kind is None or way is None else {kind: way._asdict()}),
        "by": "step",
        "us": us[0],
        "parts_us": us[-2],
        "library_us": us[-1],
        "tb_s": round(layer.num_bytes / us[0] / 1e6, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", choices=tuning.CLASSES, default=[1])
    parser.add_argument("--write", action="store_true", help="the fastest mixes into the GPU's table")
    asked = parser.parse_args(arguments)
    made: list[Row] = []
    wanted: list[tuple[Layer, int, Way]] = []
    with torch.inference_mode():
        bench = Bench(max(MODELS[name].num_bytes for name in asked.models) // 2 + (1 << 29))
        layers = [layer for name in asked.models for layer in MODELS[name].layers.values()]
        make_tiles(bench, layers, {}, True, asked.tokens)
        for name in asked.models:
            for num_tokens in asked.tokens:
                rows, best = step_rows(name, bench, num_tokens)
                made += rows
                wanted += zip(MODELS[name].layers.values(), [num_tokens] * len(best), best, strict=True)
        write_record("gpu_step_ways", made)  # of the tree as it is committed
        if asked.write:
            STORE.carveout = 100
            write_choices([chosen(bench, *each) for each in wanted])


if __name__ == "__main__":
    main()
