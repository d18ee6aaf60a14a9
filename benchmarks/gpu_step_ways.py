"""A decode step of one token, made of its ops: which way for which layer, and how L1 is split.

    python -m benchmarks.gpu_step_ways [--models llama-8b smollm2-135m] [--write]

What wins the race of one layer against itself (gpu_linears --tune) need not win a step: a tile's block has a
multiprocessor for itself, Triton's kernels want L1, and each kernel begins when the one before lets it.  So
all mixes of the two ways for the five layers race as whole steps at a context of 544, norms, rotation and
attention included, and with 75 and 100 percent of L1 as shared memory.  `--write` puts the fastest that the
engine would run (`share_of_l1`) into ops/tuned/<gpu>.json, as the choices for one token.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_attention import CONTEXT
from benchmarks.gpu_attention import MODELS as ATTENTION
from benchmarks.gpu_attention import step as attention_step
from benchmarks.gpu_graphs import captured, race
from benchmarks.gpu_linears import key_of, layer_graphs, read_choices, tuned_path, write_choices
from benchmarks.linear_layers import EPS, MODELS, Bench, Layer, Model, ours
from benchmarks.record import Row, write_record
from ostinato.ops import rope_attention, tuning, wgmma_linear
from ostinato.ops.kernel_store import STORE
from ostinato.ops.skinny_rows import Config
from ostinato.ops.wgmma_linear import Tile
from ostinato.runtime.gpu.gpu_model import share_of_l1

HEADS = {"llama-8b": ATTENTION["8b"], "smollm2-135m": ATTENTION["smol"]}

Mix = tuple[Config | Tile, ...]  # of the layers, in their order
Run = tuple[Mix, int]  # with a percentage of L1


def mixes(spec: Model) -> list[Mix]:
    """Each layer by the Triton kernel that the table or the default has for a token, or by a tile."""
    table, places = read_choices(tuned_path()), wgmma_linear.multiprocessors(torch.cuda.current_device())
    both = []
    for layer in spec.layers.values():
        found = [table.get(key_of(layer, n)) for n in (1, 4, 8)]
        config = next((w for w in found if isinstance(w, Config) and w.split == 1), None)
        tile = next((w for w in found if isinstance(w, Tile)), None)
        both.append(
            (
                config or layer.op._config(1, layer.num_out, layer.width, torch.bfloat16),
                tile or wgmma_linear.default_tile(1, layer.num_out, layer.is_gated, places),
            )
        )
    return list(product(*both))


def shapes(spec: Model) -> list[tuning.Shape]:
    return [
        tuning.Shape(layer.op.__name__.rpartition(".")[2], 1, layer.num_out, layer.width, "bfloat16")
        for layer in spec.layers.values()
    ]


def share(spec: Model, mix: Mix) -> int:
    """What the engine would take."""
    ways = [
        tuning.Choice(tile=way._asdict()) if isinstance(way, Tile) else tuning.Choice(way._asdict())
        for way in mix
    ]
    return share_of_l1(shapes(spec), dict(zip(shapes(spec), ways, strict=True)))


def whole_step(name: str, bench: Bench) -> Callable[[Mix], Tensor]:
    """Runs a step of one token by a mix."""
    spec, heads = MODELS[name], HEADS[name]
    *block, head = spec.layers.values()
    weights, first = [], 0
    for _ in range(spec.num_layers):
        for layer in block:
            weights.append(bench.weights(layer, 1, first)[0])
            first += layer.num_rows * layer.width
    last = bench.weights(head, 1, first)[0]
    given = attention_step(heads, 1, CONTEXT, 1)
    planes = [given.planes[at % len(given.planes)] for at in range(spec.num_layers)]
    slots = given.slots(CONTEXT - 1)
    embedded = torch.randn(1, block[0].width, device="cuda").bfloat16()
    cos, sin = (torch.randn(1, heads.size, device="cuda").bfloat16() for _ in range(2))
    widths = [count * heads.size for count in (heads.heads, heads.kv_heads, heads.kv_heads)]
    rest = (None, None, EPS, 0.0, True, False, given.tables, given.lengths, given.starts, given.scale, 0, 0.0)

    def attended(qkv: Tensor, at: int) -> Tensor:
        q, k, v = (part.view(1, -1, heads.size) for part in qkv.split(widths, 1))
        return rope_attention.OP(q, k, v, cos, sin, *planes[at], slots, *rest).view(1, -1)

    def run(mix: Mix) -> Tensor:
        def layer(which: int, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
            return ours(list(spec.layers.values())[which], x, weight, bench.norm, residual, mix[which])

        x, each = embedded, iter(weights)
        for at in range(spec.num_layers):
            x = layer(1, attended(layer(0, x, next(each), x), at), next(each), x)
            x = layer(3, layer(2, x, next(each), x), next(each), x)
        return layer(4, x, last, x)

    return run


def graph(run: Callable[[Mix], Tensor], of: Run) -> torch.cuda.CUDAGraph:
    STORE.carveout = of[1]
    return captured(lambda: run(of[0]))


def told(run: Run) -> str:
    return "".join("w" if isinstance(way, Tile) else "t" for way in run[0]) + f"_{run[1]}"


def step_rows(name: str, bench: Bench) -> tuple[list[Row], Mix]:
    """The best mixes and the two pure ones, and the best that the engine would run."""
    spec, run = MODELS[name], whole_step(name, bench)
    choices = read_choices(tuned_path())
    now = tuple(
        choices.get(key_of(layer, 1)) or mix
        for layer, mix in zip(spec.layers.values(), mixes(spec)[0], strict=True)
    )
    every = [(mix, percent) for mix in mixes(spec) for percent in (75, 100)]
    looks = [min(samples) for samples in race([graph(run, of) for of in every], spec.num_bytes, 3)]
    order = [every[at] for at in sorted(range(len(every)), key=looks.__getitem__)]
    allowed = [of for of in order if of[1] == share(spec, of[0])]
    before = now, share(spec, now)
    pure = [every[0], every[1], every[-2], every[-1]]
    finals = list(dict.fromkeys([before, *allowed[:4], *order[:2], *pure]))
    took = race([graph(run, of) for of in finals], spec.num_bytes, 21)
    ms = [statistics.median(samples) for samples in took]
    rows = [
        Row.of(f"gpu_step_{name}_t1_{told(of)}_ms", samples, "ms", ms[0], f"the table's mix, {told(before)}")
        for of, samples in zip(finals, took, strict=True)
    ]
    best = min((at for at, of in enumerate(finals) if of in (before, *allowed)), key=ms.__getitem__)
    return rows, finals[best][0]


def chosen(bench: Bench, layer: Layer, way: Config | Tile) -> dict[str, Any]:
    """A row of the table: how long the layer takes by itself, this way and others."""
    graphs, count = layer_graphs(bench, layer, 1, [way])
    us = [round(statistics.median(s) * 1e3 / count, 3) for s in race(graphs, count * layer.num_bytes, 7)]
    return {
        "op": layer.op.__name__.rpartition(".")[2],
        "tokens": 1,
        "out": layer.num_out,
        "width": layer.width,
        "dtype": "bfloat16",
        ("tile" if isinstance(way, Tile) else "config"): way._asdict(),
        "us": us[0],
        "parts_us": us[1],
        "library_us": us[2],
        "tb_s": round(layer.num_bytes / us[0] / 1e6, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--write", action="store_true", help="the fastest mix into the GPU's table")
    asked = parser.parse_args(arguments)
    made: list[Row] = []
    wanted: list[tuple[Layer, Config | Tile]] = []
    with torch.inference_mode():
        bench = Bench(max(MODELS[name].num_bytes for name in asked.models) // 2 + (1 << 29))
        for name in asked.models:
            rows, best = step_rows(name, bench)
            made += rows
            wanted += zip(MODELS[name].layers.values(), best, strict=True)
        write_record("gpu_step_ways", made)  # of the tree as it is committed
        if asked.write:
            write_choices([chosen(bench, layer, way) for layer, way in wanted])


if __name__ == "__main__":
    main()
