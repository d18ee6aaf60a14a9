"""Attention of a step on a GPU: decode, prefill, the rotary embedding with its KV write, and both in one.

    python -m benchmarks.gpu_attention [--only decode|prefill|rope|fused] [--candidates]

Each measurement is a CUDA graph of many launches, one after another as the layers of a model, each over KV
blocks of its own, so that nothing is found in L2; blocks are shuffled.  TB/s counts the keys and values that
a step must read (or the bytes that are moved), TFLOP/s the products with visible keys.  The baseline is
scaled_dot_product_attention over keys and values that lie side by side, in the same race.
`--candidates` also times every configuration in the kernels' tables.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_graphs import captured, copy_speed, race
from benchmarks.record import Row, write_record
from ostinato.ops import paged_attention, paged_decode, paged_prefill, rope_attention, rope_kv_write

BLOCK = 16
CONTEXT = 544  # keys of about the middle step of gpu_engine's decode, in whole blocks
WINDOW = 8192  # tokens that a block table has room for, as there
L2_TIMES = 4 * (60 << 20)  # bytes that a race goes through, at least


class Model(NamedTuple):
    heads: int
    kv_heads: int
    size: int


MODELS = {"8b": Model(32, 8, 128), "smol": Model(9, 3, 64)}
DECODE = [("8b", batch, context) for context in (CONTEXT, 4096) for batch in (1, 8, 32, 128, 256)]
DECODE += [("smol", batch, CONTEXT) for batch in (1, 8, 32)]
PREFILL = [("8b", 512), ("8b", 2048), ("8b", 4096), ("smol", 2048)]
ROPE = [("8b", 1), ("8b", 32), ("8b", 256), ("8b", 4096), ("smol", 1)]
FUSED = [("8b", batch) for batch in (1, 8, 16, 32, 64, 128, 256)] + [("smol", 1), ("smol", 32)]


class Step(NamedTuple):
    """Inputs of one step; planes of several layers."""

    q: Tensor
    planes: list[tuple[Tensor, Tensor]]
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    scale: float

    def slots(self, position: int) -> Tensor:
        """Where each sequence has the key of a position."""
        return self.tables[:, position // BLOCK].long() * BLOCK + position % BLOCK

    def calls(self, run: Callable[..., object]) -> Callable[[], object]:
        rest = self.tables, self.lengths, self.starts
        return lambda: [run(self.q, k, v, *rest, self.scale, 0, 0.0) for k, v in self.planes]


def step(model: Model, batch: int, context: int, new: int) -> Step:
    blocks = batch * -(-context // BLOCK)
    layer_bytes = 2 * blocks * BLOCK * model.kv_heads * model.size * 2
    layers = max(min(-(-L2_TIMES // layer_bytes), 64), 4 if new == 1 else 1)
    shape = blocks, BLOCK, model.kv_heads, model.size
    planes = [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(layers)
    ]
    used = torch.randperm(blocks, device="cuda").int().view(batch, -1)
    room = max(WINDOW // BLOCK - used.shape[1], 0)  # a table's width decides how keys are split
    tables = torch.cat([used, used.new_zeros(batch, room)], 1)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new
    q = torch.randn(batch * new, model.heads, model.size, device="cuda", dtype=torch.bfloat16)
    return Step(q, planes, tables, lengths, starts, model.size**-0.5)


def library(model: Model, given: Step) -> Callable[[], object]:
    """The library's attention over the same number of keys, side by side: no table to follow."""
    batch = len(given.lengths)
    dense = [
        tuple(plane.view(batch, -1, model.kv_heads, model.size).transpose(1, 2) for plane in planes)
        for planes in given.planes
    ]
    q = given.q.view(batch, -1, model.heads, model.size).transpose(1, 2)
    is_causal = q.shape[2] > 1
    return lambda: [
        F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=given.scale, enable_gqa=True)
        for k, v in dense
    ]


def check(model: Model, given: Step) -> None:
    """The first layer against the definition in float32, for some of the tokens."""
    k, v = given.planes[0]
    out = paged_attention.OP(given.q, k, v, given.tables, given.lengths, given.starts, given.scale, 0, 0.0)
    num_new = len(given.q) // len(given.lengths)
    for token in {0, len(given.q) // 2, len(given.q) - 1}:
        row, context = token // num_new, k.shape[0] * BLOCK // len(given.lengths)
        visible = context - num_new + token % num_new + 1
        group = model.heads // model.kv_heads
        blocks = given.tables[row, : -(-context // BLOCK)].long()
        keys, values = (
            plane[blocks].flatten(0, 1)[:visible].float().repeat_interleave(group, 1) for plane in (k, v)
        )
        scores = torch.einsum("hd,lhd->hl", given.q[token].float(), keys) * given.scale
        truth = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        error = float((out[token].float() - truth).norm() / truth.norm())
        if not error < 1e-2:
            raise RuntimeError(f"token {token} of {len(given.q)}: relative error {error:.3g}")


def times(calls: list[Callable[[], object]], num_layers: int, layer_us: float) -> list[list[float]]:
    """Microseconds of one layer for each of the calls; `layer_us` is about what one takes."""
    as_bytes = round(num_layers * max(layer_us, 4.0) * 4e6)  # `race` takes 4 TB/s for granted
    return [
        [ms * 1e3 / num_layers for ms in samples]
        for samples in race([captured(call) for call in calls], as_bytes, 7)
    ]


def decode_rows(name: str, batch: int, context: int, speed: float, has_candidates: bool) -> list[Row]:
    model, metric = MODELS[name], f"gpu_attention_{name}_b{batch}_c{context}"
    given = step(model, batch, context, 1)
    check(model, given)
    num_bytes = 2 * batch * context * model.kv_heads * model.size * 2
    calls = [given.calls(paged_attention.OP), library(model, given)]
    configs: tuple[paged_decode.DecodeConfig, ...] = ()
    if has_candidates:
        configs = paged_decode.CANDIDATES[2 * model.size]

    def with_config(config: paged_decode.DecodeConfig) -> Callable[..., object]:
        def run(*args: Any) -> None:
            call = cast(Any, paged_decode.decode)
            out = torch.empty_like(given.q)
            call(*args[:6], None, out, *args[6:], singles_only=False, config=config)

        return run

    calls += [given.calls(with_config(config)) for config in configs]
    ours, theirs, *others = times(calls, len(given.planes), num_bytes / 4e6)
    made = [
        Row.of(f"{metric}_us", ours, "us", statistics.median(theirs), "SDPA, keys side by side"),
        Row.of(f"{metric}_tb_s", [num_bytes / us / 1e6 for us in ours], "TB/s", speed, "copy speed"),
    ]
    for config, samples in zip(configs, others, strict=True):
        told = "_".join(map(str, config))
        made.append(Row.of(f"{metric}_us_{told}", samples, "us", statistics.median(ours), "the default"))
    return made


def prefill_rows(name: str, num_tokens: int, has_candidates: bool) -> list[Row]:
    model, metric = MODELS[name], f"gpu_prefill_attention_{name}_t{num_tokens}"
    given = step(model, 1, num_tokens, num_tokens)
    check(model, given)
    operations = 4 * model.heads * model.size * num_tokens * (num_tokens + 1) / 2
    calls = [given.calls(paged_attention.OP), library(model, given)]
    configs: tuple[paged_prefill.PrefillConfig, ...] = ()
    if has_candidates:
        configs = paged_prefill.CANDIDATES[model.size]

    def with_config(config: paged_prefill.PrefillConfig) -> Callable[..., object]:
        def run(*args: Any) -> None:
            call = cast(Any, paged_prefill.prefill)
            out = torch.empty_like(given.q)
            call(*args[:6], None, out, *args[6:], min_new=1, config=config)

        return run

    calls += [given.calls(with_config(config)) for config in configs]
    ours, theirs, *others = times(calls, len(given.planes), operations / 4e8)
    speed = [operations / us / 1e6 for us in ours]
    floor = statistics.median(theirs)
    made = [
        Row.of(f"{metric}_us", ours, "us", floor, "SDPA, keys side by side"),
        Row.of(f"{metric}_tflop_s", speed, "TFLOP/s", operations / floor / 1e6, "SDPA, keys side by side"),
    ]
    for config, samples in zip(configs, others, strict=True):
        told = "_".join(map(str, config))
        made.append(Row.of(f"{metric}_us_{told}", samples, "us", statistics.median(ours), "the default"))
    return made


def rope_rows(name: str, num_tokens: int, speed: float) -> list[Row]:
    model, metric = MODELS[name], f"gpu_rope_kv_write_{name}_t{num_tokens}"
    width = (model.heads + 2 * model.kv_heads) * model.size
    layers = min(max(L2_TIMES // (num_tokens * width * 2), 4), 32)
    merged = torch.randn(layers, num_tokens, width, device="cuda", dtype=torch.bfloat16)
    parts = [model.heads * model.size, model.kv_heads * model.size, model.kv_heads * model.size]
    tables = [torch.randn(num_tokens, model.size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    blocks = -(-num_tokens // BLOCK)
    shape = blocks, BLOCK, model.kv_heads, model.size
    planes = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.arange(num_tokens, device="cuda")

    def run() -> list[Tensor]:
        made = []
        for layer in merged:
            q, k, v = (part.unflatten(1, (-1, model.size)) for part in layer.split(parts, 1))
            made.append(
                rope_kv_write.OP(q, k, v, *tables, *planes, slots, None, None, 1e-6, 0.0, True, False)
            )
        return made

    num_bytes = 2 * num_tokens * width * 2
    (ours,) = times([run], layers, num_bytes / 4e6)
    return [
        Row.of(f"{metric}_us", ours, "us", num_bytes / speed / 1e6, "its bytes at copy speed"),
        Row.of(f"{metric}_tb_s", [num_bytes / us / 1e6 for us in ours], "TB/s", speed, "copy speed"),
    ]


def fused_rows(name: str, batch: int) -> list[Row]:
    """rope_attention against the two ops that it stands for."""
    model, context = MODELS[name], CONTEXT
    given = step(model, batch, context, 1)
    width = (model.heads + 2 * model.kv_heads) * model.size
    merged = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
    parts = [model.heads * model.size, model.kv_heads * model.size, model.kv_heads * model.size]
    q, k, v = (part.unflatten(1, (-1, model.size)) for part in merged.split(parts, 1))
    half = torch.randn(2, batch, model.size // 2, device="cuda", dtype=torch.bfloat16)
    tables = half.repeat(1, 1, 2).unbind()  # as rope_table makes them: the second half repeats the first
    slots = given.slots(context - 1)
    where = given.tables, given.lengths, given.starts, given.scale, 0, 0.0

    def together() -> list[Tensor]:
        return [
            rope_attention.OP(q, k, v, *tables, *p, slots, None, None, 1e-6, 0.0, True, False, *where)
            for p in given.planes
        ]

    def apart() -> list[Tensor]:
        made = []
        for p in given.planes:
            turned = rope_kv_write.OP(q, k, v, *tables, *p, slots, None, None, 1e-6, 0.0, True, False)
            made.append(paged_attention.OP(turned, *p, *where))
        return made

    near, far = torch.stack(together()).float(), torch.stack(apart()).float()
    error = float((near - far).norm() / far.norm())
    if not error < 1e-2:
        raise RuntimeError(f"{name}, batch {batch}: one launch and two differ by {error:.3g}")
    num_bytes = 2 * batch * context * model.kv_heads * model.size * 2
    one, two = times([together, apart], len(given.planes), num_bytes / 4e6)
    metric = f"gpu_rope_attention_{name}_b{batch}_c{context}_us"
    return [Row.of(metric, one, "us", statistics.median(two), "the two ops")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("decode", "prefill", "rope", "fused"))
    parser.add_argument("--candidates", action="store_true", help="time every configuration")
    args = parser.parse_args()
    torch.manual_seed(0)
    speed, rows = copy_speed(), list[Row]()
    if args.only in (None, "decode"):
        for name, batch, context in DECODE:
            rows += decode_rows(name, batch, context, speed, args.candidates)
    if args.only in (None, "prefill"):
        for name, num_tokens in PREFILL:
            rows += prefill_rows(name, num_tokens, args.candidates)
    if args.only in (None, "rope"):
        for name, num_tokens in ROPE:
            rows += rope_rows(name, num_tokens, speed)
    if args.only in (None, "fused"):
        for name, batch in FUSED:
            rows += fused_rows(name, batch)
    write_record("gpu_attention", rows)


if __name__ == "__main__":
    main()
