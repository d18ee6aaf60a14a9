"""The linear layers of a decode step on a GPU: skinny_linear and skinny_gated against the library.

    python -m benchmarks.gpu_linears [--models llama-8b smollm2-135m] [--tokens 1 8 ...] [--tune]

For each model and number of tokens: all linear layers of a step under one CUDA graph, every layer with
weights of its own, so that nothing is found in L2.  Ours (norm, residual and activation inside), the parts
(norm, F.linear, sum and activation kernels one by one) and F.linear alone take turns.  Then single layers,
captured as a chain over many copies of the weight.  TB/s counts the bytes of weights only.

Ours go the ways of the GPU's table, ops/tuned/<gpu>.json, and the written default elsewhere. `--tune` first
measures all layers of the models as `compile-model` does (runtime/gpu/layer_tuning.py) and writes the table.
Every variant is compiled before, in processes of their own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_graphs import captured, copy_speed, race
from benchmarks.linear_layers import EPS, MODELS, WORST_ERROR, Bench, Layer, Model, check, ours, parts
from benchmarks.record import Row, header, write_record
from ostinato.ops import add_rms_norm, rms_norm, silu_mul, tuning
from ostinato.ops.kernel_store import STORE
from ostinato.runtime.gpu.gpu_backend import step_carveout
from ostinato.runtime.gpu.kernel_workers import compile_all
from ostinato.runtime.gpu.layer_calls import LayerCall, layers_of
from ostinato.runtime.gpu.layer_tuning import Gpu, tune_layers

Work = Callable[[], object]


def calls(bench: Bench, layer: Layer) -> list[LayerCall]:
    """A layer as a step calls it, with weights for a chain."""
    norm = bench.norm[: layer.width] if layer.has_norm else None
    weights, _, residual = bench.chain(layer, 1)
    if layer.is_gated:
        return [LayerCall("skinny_gated", w, (norm, EPS, 0.0, True, "silu")) for w in weights]
    rest = (None, norm, EPS, 0.0, True, residual if layer.has_residual else None)
    return [LayerCall("skinny_linear", w, rest) for w in weights]


def tune(bench: Bench, layers: Sequence[Layer]) -> Row:
    """Measure them and write what was found into the GPU's table."""
    made = layers_of([call for layer in layers for call in calls(bench, layer)])
    tuned = tune_layers(made, {}, Gpu.of(torch.device("cuda", 0)), math.inf)
    tuning.add(tuning.table_path(), tuned.rows, header=header())
    for row in tuned.rows:
        way = row.get("tile") or row.get("config") or {"parts": 0}
        times = "".join(f"{row.get(name, math.nan):9.2f}" for name in ("us", "default_us", "parts_us"))
        print(f"{row['op']:14} t{row['tokens']:<3}{row['out']:>7} x {row['width']:<6}{times}  {way}")
    print(f"{tuned.num_candidates} candidates; written: {tuning.table_path().name}", flush=True)
    return Row.of("gpu_linears_tune_s", [tuned.seconds], "s", tuned.compile_s, "its compilers' share")


def layer_work(bench: Bench, layer: Layer, num_tokens: int) -> tuple[list[Work], int]:
    """A chain of one layer: ours, F.linear; launches in each."""
    weights, x, residual = bench.chain(layer, num_tokens)

    def run_ours() -> None:
        for weight in weights:
            ours(layer, x, weight, bench.norm, residual)

    def run_library() -> None:
        for weight in weights:
            F.linear(x, weight)

    return [run_ours, run_library], len(weights)


def stack_work(bench: Bench, spec: Model, num_tokens: int) -> list[Callable[[], Tensor]]:
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

    def run_ours() -> Tensor:
        x, each = embedded, iter(weights)
        for _ in range(spec.num_layers):
            mixed = ours(qkv, x, next(each), norm, x)[:, : o.width]
            x = ours(o, mixed, next(each), norm, x)
            wide = ours(gate_up, x, next(each), norm, x)
            x = ours(down, wide, next(each), norm, x)
        return ours(head, x, next(each), norm, x)

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

    return [run_ours, run_parts, run_library]


def stack_rows(bench: Bench, name: str, num_tokens: int, copy_tb_s: float) -> list[Row]:
    spec, metric = MODELS[name], f"gpu_linears_{name}_t{num_tokens}"
    STORE.carveout = step_carveout(num_tokens)
    work = stack_work(bench, spec, num_tokens)
    near, far = (run().float() for run in work[:2])
    error = float((near - far).norm() / far.norm())
    if not error < 10 * WORST_ERROR:  # bf16 sums of dozens of layers
        raise RuntimeError(
            f"{spec.num_layers} layers with {num_tokens} tokens: relative difference {error:.3g}"
        )
    mine, apart, library = race([captured(run) for run in work], spec.num_bytes, 9)
    floor, speed = statistics.median(library), [spec.num_bytes / ms / 1e9 for ms in mine]
    return [
        Row.of(f"{metric}_ms", mine, "ms", floor, "F.linear alone"),
        Row.of(f"{metric}_parts_ms", apart, "ms", floor, "F.linear alone"),
        Row.of(f"{metric}_tb_s", speed, "TB/s", copy_tb_s, "copy speed"),
    ]


def layer_rows(bench: Bench, name: str, num_tokens: int, copy_tb_s: float) -> list[Row]:
    made = []
    STORE.carveout = step_carveout(num_tokens)
    for part, layer in MODELS[name].layers.items():
        check(bench, layer, num_tokens)
        work, count = layer_work(bench, layer, num_tokens)
        mine, library = race([captured(run) for run in work], count * layer.num_bytes, 7)
        us, baseline = [ms * 1e3 / count for ms in mine], statistics.median(library) * 1e3 / count
        speed = [layer.num_bytes / each / 1e6 for each in us]
        metric = f"gpu_linear_{name}_{part}_t{num_tokens}"
        made.append(Row.of(f"{metric}_us", us, "us", baseline, "F.linear alone"))
        made.append(Row.of(f"{metric}_tb_s", speed, "TB/s", copy_tb_s, "copy speed"))
    return made


def compile_kernels(bench: Bench, names: Sequence[str], tokens: Sequence[int]) -> Row:
    """All that will be launched, several at once; the parts of single layers too, which check them."""
    began = time.perf_counter()
    with STORE.recording(is_dry=True) as wanted:
        for name in names:
            for num_tokens in tokens:
                STORE.carveout = step_carveout(num_tokens)
                for run in stack_work(bench, MODELS[name], num_tokens)[:2]:
                    run()
                for layer in MODELS[name].layers.values():
                    weights, x, residual = bench.chain(layer, num_tokens)
                    ours(layer, x, weights[0], bench.norm, residual)
                    parts(layer, *(t.float() for t in (x, weights[0], bench.norm, residual)))
    missing = STORE.missing(wanted.variants.values())
    for binary, cubin in compile_all(missing, 90):
        STORE.add(binary, cubin)
    took = time.perf_counter() - began
    return Row.of("gpu_linears_compile_s", [took], "s", None, f"{len(missing)} variants, in parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 192, 256], help="1 to 256 each"
    )
    parser.add_argument(
        "--layer-tokens", type=int, nargs="*", default=[1, 8, 32, 128, 256], help="for single layers"
    )
    parser.add_argument("--tune", action="store_true", help="measure the layers and write the GPU's table")
    arguments = parser.parse_args()
    names = arguments.models
    with torch.inference_mode():
        copy_tb_s = copy_speed()
        bench = Bench(max(MODELS[name].num_bytes for name in names) // 2 + (1 << 29))
        made = [Row.of("gpu_copy_tb_s", [copy_tb_s], "TB/s", None, "none")]
        if arguments.tune:
            layers = dict.fromkeys(layer for name in names for layer in MODELS[name].layers.values())
            made.append(tune(bench, list(layers)))
        tokens = {*arguments.tokens, *arguments.layer_tokens}
        made.append(compile_kernels(bench, names, sorted(tokens)))
        for name in names:
            for num_tokens in arguments.tokens:
                made += stack_rows(bench, name, num_tokens, copy_tb_s)
            for num_tokens in arguments.layer_tokens:
                made += layer_rows(bench, name, num_tokens, copy_tb_s)
        write_record("gpu_linears", made)


if __name__ == "__main__":
    main()
