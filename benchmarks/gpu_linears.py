"""The linear layers of a decode step on a GPU: skinny_linear and skinny_gated against the library.

    python -m benchmarks.gpu_linears [--models llama-8b smollm2-135m] [--tokens 1 8 ...] [--tune {all,tiles}]

For each model and number of tokens: all linear layers of a step under one CUDA graph, every layer with
weights of its own, so that nothing is found in L2.  Ours (norm, residual and activation inside), the parts
(norm, F.linear, sum and activation kernels one by one) and F.linear alone take turns.  Then single layers,
captured as a chain over many copies of the weight.  TB/s counts the bytes of weights only.

`--tune all` first times every candidate of every shape, and writes the best to ops/tuned/<gpu>.json; `tiles`
keeps what that table has of the Triton kernels and tries the tiles of wgmma_linear beside it.  An output
projection is timed behind the attention that makes its x.  A run without it uses that file where it exists,
and the written default elsewhere.  Every variant is compiled before, in processes of their own, and every
configuration that is timed is checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_attention import CONTEXT
from benchmarks.gpu_attention import MODELS as ATTENTION
from benchmarks.gpu_attention import step as attention_step
from benchmarks.gpu_graphs import captured, copy_speed, race
from benchmarks.linear_layers import EPS, MODELS, WORST_ERROR, Bench, Layer, Model, check, ours, parts
from benchmarks.record import ROOT, Row, header, write_record
from ostinato.ops import add_rms_norm, paged_attention, rms_norm, silu_mul, wgmma_linear
from ostinato.ops.kernel_store import STORE
from ostinato.ops.skinny_rows import MAX_TOKENS, Config, token_block
from ostinato.ops.tuning import CLASSES
from ostinato.ops.wgmma_linear import Tile
from ostinato.runtime.gpu.kernel_workers import compile_all as compile_tiles

TUNED = ROOT / "ops" / "tuned"

Key = tuple[bool, int, int, int]  # is gated, most tokens, outputs, width
Way = Config | Tile
Choices = dict[Key, Way]


def key_of(layer: Layer, num_tokens: int) -> Key:
    return layer.is_gated, next(c for c in CLASSES if c >= num_tokens), layer.num_out, layer.width


def layer_graphs(
    bench: Bench, layer: Layer, num_tokens: int, configs: Sequence[Way | None]
) -> tuple[list[torch.cuda.CUDAGraph], int]:
    """Graphs of the configurations, then of the parts and of F.linear alone; launches in each."""
    weights, x, residual = bench.chain(layer, num_tokens)
    set_carveout(num_tokens)
    for config in configs:
        check(layer, x, weights[0], bench.norm, residual, config)
    attended = attention(layer, x)

    def graph(product: Callable[[Tensor, Tensor], Tensor]) -> torch.cuda.CUDAGraph:
        return captured(lambda: [product(attended(at), w) for at, w in enumerate(weights)])

    graphs = [
        graph(lambda x, w: ours(layer, x, w, bench.norm, residual, config))  # noqa: B023  # called at once
        for config in configs
    ]
    graphs.append(graph(lambda x, w: parts(layer, x, w, bench.norm, residual)))
    graphs.append(graph(F.linear))
    return graphs, len(weights)


def set_carveout(num_tokens: int) -> None:
    """As the engine has it."""
    STORE.carveout = 50 if num_tokens == 1 else 100


def attention(layer: Layer, x: Tensor) -> Callable[[int], Tensor]:
    """The x of each copy of a layer: for an output projection what attention gives, else `x`.

    Weights that are on their way while it runs are half of what such a layer costs.
    """
    heads = next((m for m in ATTENTION.values() if m.heads * m.size == layer.width), None)
    if heads is None or not layer.has_residual or layer.num_out != layer.width:
        return lambda _: x
    given = attention_step(heads, len(x), CONTEXT, 1)
    rest = given.tables, given.lengths, given.starts, given.scale, 0, 0.0

    def attended(at: int) -> Tensor:
        planes = given.planes[at % len(given.planes)]
        return paged_attention.OP(given.q, *planes, *rest).view(len(x), layer.width)

    return attended


def candidates(layer: Layer, num_tokens: int, tuned: Choices | None) -> list[Way]:
    """The defaults first; with a table, its choice in place of all configurations of the Triton kernels."""
    made: list[Way] = []
    if num_tokens <= MAX_TOKENS:
        made.append(layer.op._config(num_tokens, layer.num_out, layer.width, torch.bfloat16))
    if tuned is not None:
        made += [tuned[key] for key in (key_of(layer, num_tokens),) if key in tuned]
    elif num_tokens <= MAX_TOKENS:
        made += [c for c in layer.op.CANDIDATES if c.by_tensor_cores or num_tokens <= 8]
    return list(dict.fromkeys([*made, *tiles(layer, num_tokens)]))


def tiles(layer: Layer, num_tokens: int) -> list[Way]:
    """Tiles that a launch can have, the default first."""
    places = wgmma_linear.multiprocessors(torch.cuda.current_device())
    wanted = [wgmma_linear.default_tile(num_tokens, layer.num_out, layer.is_gated, places)]
    for tile in wgmma_linear.CANDIDATES[min(-(-num_tokens // 64), 4)]:
        with suppress(ValueError):
            wgmma_linear.check_tile("", tile, layer.is_gated)
            wanted.append(tile)
    return list(dict.fromkeys(wanted))


def tune(
    bench: Bench, layers: Sequence[Layer], classes: Sequence[int], tuned: Choices | None
) -> list[dict[str, Any]]:
    """The best configuration of each layer and class of tokens: a first look at all, then a race of three."""
    made = []
    for layer in layers:
        for num_tokens in classes:
            configs = candidates(layer, num_tokens, tuned)
            graphs, count = layer_graphs(bench, layer, num_tokens, configs)
            num_bytes = count * layer.num_bytes
            looks = [min(samples) for samples in race(graphs[:-2], num_bytes, 2)]
            best = sorted(range(len(configs)), key=looks.__getitem__)[:3]
            finals = race([*(graphs[i] for i in best), *graphs[-2:]], num_bytes, 7)
            *own, parts_ms, library_ms = (statistics.median(samples) for samples in finals)
            config = configs[best[own.index(min(own))]]
            us = [round(ms * 1e3 / count, 3) for ms in (min(own), parts_ms, library_ms)]
            made.append(
                {
                    "op": layer.op.__name__.rpartition(".")[2],
                    "tokens": num_tokens,
                    "out": layer.num_out,
                    "width": layer.width,
                    "dtype": "bfloat16",
                    ("tile" if isinstance(config, Tile) else "config"): config._asdict(),
                    "us": us[0],
                    "parts_us": us[1],
                    "library_us": us[2],
                    "tb_s": round(layer.num_bytes / us[0] / 1e6, 3),
                }
            )
            print(
                f"{made[-1]['op']:14} t{num_tokens:<3}{layer.num_out:>7} x {layer.width:<6} {us[0]:8.2f} us "
                f"{made[-1]['tb_s']:6.2f} TB/s  parts {us[1]:8.2f}  library {us[2]:8.2f}  {tuple(config)}",
                flush=True,
            )
    return made


def stack_graphs(bench: Bench, spec: Model, num_tokens: int, choices: Choices) -> list[torch.cuda.CUDAGraph]:
    """All linear layers of a step: ours, the parts, and F.linear alone."""
    *block, head = spec.layers.values()
    weights, first = [], 0
    for _ in range(spec.num_layers):
        for layer in block:
            weights.append(bench.weights(layer, 1, first)[0])
            first += layer.num_rows * layer.width
    weights.append(bench.weights(head, 1, first)[0])
    qkv, o, gate_up, down = block
    norm = bench.norm[: qkv.width]
    embedded = torch.randn(num_tokens, qkv.width, device="cuda").bfloat16()
    config = {layer: choices.get(key_of(layer, num_tokens)) for layer in spec.layers.values()}
    set_carveout(num_tokens)

    def run_ours() -> Tensor:
        x, each = embedded, iter(weights)
        for _ in range(spec.num_layers):
            mixed = ours(qkv, x, next(each), norm, x, config[qkv])[:, : o.width]
            x = ours(o, mixed, next(each), norm, x, config[o])
            wide = ours(gate_up, x, next(each), norm, x, config[gate_up])
            x = ours(down, wide, next(each), norm, x, config[down])
        return ours(head, x, next(each), norm, x, config[head])

    def run_parts() -> Tensor:
        total, each = embedded, iter(weights)
        x = rms_norm.OP(total, norm, EPS, 0.0, True)
        for _ in range(spec.num_layers):
            mixed = F.linear(x, next(each))[:, : o.width]
            x, total = add_rms_norm.OP(F.linear(mixed, next(each)), total, norm, EPS, 0.0, True)
            wide = silu_mul.OP(*F.linear(x, next(each)).chunk(2, -1))
            x, total = add_rms_norm.OP(F.linear(wide, next(each)), total, norm, EPS, 0.0, True)
        return F.linear(x, next(each))

    def run_library() -> Tensor:
        x, each = embedded, iter(weights)
        for _ in range(spec.num_layers):
            x = F.linear(F.linear(x, next(each))[:, : o.width], next(each))
            x = F.linear(F.linear(x, next(each))[:, : down.width], next(each))
        return F.linear(x, next(each))

    near, far = run_ours().float(), run_parts().float()
    error = float((near - far).norm() / far.norm())
    if not error < 10 * WORST_ERROR:  # bf16 sums of dozens of layers
        raise RuntimeError(
            f"{spec.num_layers} layers with {num_tokens} tokens: relative difference {error:.3g}"
        )
    return [captured(run) for run in (run_ours, run_parts, run_library)]


def stack_rows(bench: Bench, name: str, num_tokens: int, choices: Choices, copy_tb_s: float) -> list[Row]:
    spec, metric = MODELS[name], f"gpu_linears_{name}_t{num_tokens}"
    graphs = stack_graphs(bench, spec, num_tokens, choices)
    mine, apart, library = race(graphs, spec.num_bytes, 9)
    floor, speed = statistics.median(library), [spec.num_bytes / ms / 1e9 for ms in mine]
    return [
        Row.of(f"{metric}_ms", mine, "ms", floor, "F.linear alone"),
        Row.of(f"{metric}_parts_ms", apart, "ms", floor, "F.linear alone"),
        Row.of(f"{metric}_tb_s", speed, "TB/s", copy_tb_s, "copy speed"),
    ]


def layer_rows(bench: Bench, name: str, num_tokens: int, choices: Choices, copy_tb_s: float) -> list[Row]:
    made = []
    for part, layer in MODELS[name].layers.items():
        config = choices.get(key_of(layer, num_tokens))
        graphs, count = layer_graphs(bench, layer, num_tokens, [config])
        mine, _, library = race(graphs, count * layer.num_bytes, 7)
        us, baseline = [ms * 1e3 / count for ms in mine], statistics.median(library) * 1e3 / count
        speed = [layer.num_bytes / each / 1e6 for each in us]
        metric = f"gpu_linear_{name}_{part}_t{num_tokens}"
        made.append(Row.of(f"{metric}_us", us, "us", baseline, "F.linear alone"))
        made.append(Row.of(f"{metric}_tb_s", speed, "TB/s", copy_tb_s, "copy speed"))
    return made


Job = tuple[Layer, int, Config]


def jobs(layers: Sequence[Layer], has_candidates: bool) -> list[Job]:
    """One launch of every Triton variant; the number of a weight's rows makes none."""
    found: dict[tuple[Any, ...], Job] = {}
    tuned = [read_choices(path) for path in TUNED.glob("*.json")]
    for layer in layers:
        for num_tokens in (c for c in CLASSES if c <= MAX_TOKENS):
            default = layer.op._config(num_tokens, layer.num_out, layer.width, torch.bfloat16)
            wanted = [default, *(layer.op.CANDIDATES if has_candidates else ())]
            wanted += [some[key] for some in tuned if (key := key_of(layer, num_tokens)) in some]
            for config in wanted:
                if isinstance(config, Config) and (config.by_tensor_cores or num_tokens <= 8):
                    kind = layer._replace(num_rows=0), token_block(num_tokens, config), config
                    found.setdefault(kind, (layer, num_tokens, config))
    return list(found.values())


def make_tiles(bench: Bench, layers: Sequence[Layer], choices: Choices, has_candidates: bool) -> None:
    """Compile the tiles that will be timed, several at once."""
    with STORE.recording(is_dry=True) as wanted:
        for layer in layers:
            for num_tokens in CLASSES:
                chosen = choices.get(key_of(layer, num_tokens))
                some = tiles(layer, num_tokens) if has_candidates else [chosen]
                weight = bench.weights(layer, 1)[0]
                x = torch.empty(num_tokens, layer.width, dtype=torch.bfloat16, device="cuda")
                added = x.new_empty(num_tokens, layer.num_out)
                for tile in some:
                    if isinstance(tile, Tile):
                        ours(layer, x, weight, bench.norm, added, tile)
    variants = [v for v in wanted.variants.values() if v.module == wgmma_linear.__name__]
    for binary, cubin in compile_tiles(STORE.missing(variants), 90):
        STORE.add(binary, cubin)


def compile_one(job: Job) -> None:
    """In a process of its own: leaves the kernel in Triton's cache on disk."""
    layer, num_tokens, config = job
    x, residual, weight, norm = (
        torch.zeros(*size, dtype=torch.bfloat16, device="cuda")
        for size in (
            (num_tokens, layer.width),
            (num_tokens, layer.num_out),
            (layer.num_rows, layer.width),
            (layer.width,),
        )
    )
    ours(layer, x, weight, norm, residual, config)
    torch.cuda.synchronize()


def compile_all(todo: Sequence[Job]) -> float:
    """Seconds that it took. Comes before this process uses CUDA, which does not survive a fork."""
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 16, len(todo))) as pool:
        pool.map(compile_one, todo, chunksize=1)
    return time.perf_counter() - began


def tuned_path() -> Path:
    return TUNED / (torch.cuda.get_device_name().lower().replace(" ", "-") + ".json")


def read_choices(path: Path) -> Choices:
    if not path.exists():
        return {}
    return {
        (c["op"] == "skinny_gated", c["tokens"], c["out"], c["width"]): (
            Tile(**c["tile"]) if "tile" in c else Config(**c["config"])
        )
        for c in json.loads(path.read_text())["choices"]
        if c["op"] in ("skinny_linear", "skinny_gated") and c["dtype"] == "bfloat16"
    }


def write_choices(made: list[dict[str, Any]]) -> None:
    path = tuned_path()
    path.parent.mkdir(exist_ok=True)
    shape = itemgetter("op", "tokens", "out", "width", "dtype")
    before = json.loads(path.read_text())["choices"] if path.exists() else []
    rows = {shape(choice): choice for choice in [*before, *made]}
    lines = ",\n".join(f"  {json.dumps(choice)}" for choice in rows.values())
    about = json.dumps(header(), indent=1)
    path.write_text(f'{{\n"header": {about},\n"choices": [\n{lines}\n]\n}}\n')
    print(f"written: {path.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 192, 256], help="1 to 256 each"
    )
    parser.add_argument(
        "--layer-tokens", type=int, nargs="*", default=[1, 8, 32, 128, 256], help="for single layers"
    )
    parser.add_argument("--tune", choices=["all", "tiles"], help="tiles: and what the table has already")
    parser.add_argument("--classes", type=int, nargs="+", choices=CLASSES, default=CLASSES, help="to tune")
    parser.add_argument("--layers", nargs="*", default=[], help="to tune: qkv, o, gate_up, down, head; all")
    arguments = parser.parse_args()
    named = {
        layer for model in MODELS.values() for name, layer in model.layers.items() if name in arguments.layers
    }
    layers = list(dict.fromkeys(layer for name in arguments.models for layer in MODELS[name].layers.values()))
    todo = jobs(layers, arguments.tune == "all")
    took = compile_all(todo)
    with torch.inference_mode():
        copy_tb_s = copy_speed()
        bench = Bench(max(MODELS[name].num_bytes for name in arguments.models) // 2 + (1 << 29))
        made = [
            Row.of("gpu_copy_tb_s", [copy_tb_s], "TB/s", None, "none"),
            Row.of("gpu_linears_compile_s", [took], "s", None, f"{len(todo)} variants, in parallel"),
        ]
        make_tiles(bench, layers, read_choices(tuned_path()), arguments.tune is not None)
        if arguments.tune:
            began = time.perf_counter()
            tuned = read_choices(tuned_path()) if arguments.tune == "tiles" else None
            some = [layer for layer in layers if not arguments.layers or layer in named]
            write_choices(tune(bench, some, arguments.classes, tuned))
            made.append(Row.of("gpu_linears_tune_s", [time.perf_counter() - began], "s", None, "none"))
        choices = read_choices(tuned_path())
        for name in arguments.models:
            for num_tokens in arguments.tokens:
                made += stack_rows(bench, name, num_tokens, choices, copy_tb_s)
            for num_tokens in arguments.layer_tokens:
                made += layer_rows(bench, name, num_tokens, choices, copy_tb_s)
        write_record("gpu_linears", made)


if __name__ == "__main__":
    main()
