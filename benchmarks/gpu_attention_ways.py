"""Attention of a step on a GPU by each of its ways: Triton, CUDA on tensor cores, FlashAttention-3.

    python -m benchmarks.gpu_attention_ways

Llama-8B's heads, KV blocks of the default size that lie anywhere, tables for 8192 tokens. Steps are made, and
their ways checked and captured, as `compile-model` does to choose among them (`attention_tuning`), which has
the last lines: what it would choose. TFLOP/s counts the products with visible keys, TB/s the keys and values.
`splits`: FlashAttention-3 with as many programs for a sequence as it likes, in decode; no artifact uses it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.record import Row, write_record
from ostinato.ops import fa3_attention
from ostinato.ops.attention_choice import Asked, Attention, StepClass
from ostinato.runtime.config import KVConfig
from ostinato.runtime.gpu.attention_tuning import Lengths, Step, candidates, lengths_of, make_step, measure
from ostinato.runtime.gpu.graph_race import captured, race

WINDOW = 8192
HEADS = Attention(32, 8, 128, 128, KVConfig().block_tokens, "bfloat16", 0, 0.0, False)


def steps() -> dict[str, Lengths]:
    """What is measured, by name."""
    made = {f"prefill_{tokens}": Lengths([tokens], [tokens], tokens) for tokens in (512, 2048, 4096, 8192)}
    made["chunk_1024_of_4096"] = Lengths([4096], [1024], 1024)
    mixed = [480] + [1024] * 32, [480] + [1] * 32
    made["mixed_480_and_32"] = Lengths(*mixed, 512)
    made["mixed_captured_512"] = lengths_of(StepClass(HEADS, "mixed", 512), WINDOW)
    made["mixed_2048"] = lengths_of(StepClass(HEADS, "mixed", 2048), WINDOW)
    made |= {f"decode_{count}_c544": Lengths([544] * count, [1] * count, count) for count in (64, 128, 256)}
    made["decode_64_uneven"] = Lengths([100] * 60 + [4096] * 4, [1] * 64, 64)
    return made


def rows_of(name: str, lengths: Lengths) -> list[Row]:
    device = torch.device("cuda")
    step = make_step(HEADS, lengths, WINDOW, device)
    is_decode = name.startswith("decode")
    ways = [way for way in candidates(HEADS, device) if not is_decode or way != "wgmma"]
    calls: dict[str, Callable[[], object]] = {way: partial(step.run_all, way) for way in ways}
    if is_decode and "fa3" in ways:
        calls["splits"] = partial(_with_splits, step)
    graphs = [captured(call) for call in calls.values()]
    pairs = sum(
        new * (total - new) + new * (new + 1) / 2
        for total, new in zip(lengths.total, lengths.new, strict=True)
    )
    operations = 4 * HEADS.heads * HEADS.k_size * pairs
    num_bytes = 2 * sum(lengths.total) * HEADS.kv_heads * HEADS.k_size * 2
    layers = len(step.planes)
    as_bytes = layers * max(num_bytes, round(operations / 4e14 * 4e12), 1 << 25)  # `race` takes 4 TB/s
    took = race(graphs, as_bytes, 7)
    us = {way: [ms * 1e3 / layers for ms in some] for way, some in zip(calls, took, strict=True)}
    rule = "triton" if is_decode or "wgmma" not in us else "wgmma"
    usual = statistics.median(us[rule])
    made = []
    for way, some in us.items():
        metric = f"attention_{name}_{way}"
        made.append(Row.of(f"{metric}_us", some, "us", usual, f"{rule}, the rule's way"))
        if is_decode:
            made.append(Row.of(f"{metric}_tb_s", [num_bytes / x / 1e6 for x in some], "TB/s", None, "none"))
        else:
            speed = [operations / x / 1e6 for x in some]
            made.append(Row.of(f"{metric}_tflop_s", speed, "TFLOP/s", None, "none"))
    return made


def _with_splits(step: Step) -> list[Tensor]:
    made = []
    for k_cache, v_cache in step.planes:
        out = torch.empty_like(step.q)
        fa3_attention._forward()(
            step.q,
            k_cache,
            v_cache,
            out=out,
            cu_seqlens_q=step.starts,
            seqused_k=step.lengths,
            max_seqlen_q=1,
            page_table=step.tables,
            softmax_scale=step.scale,
            is_causal=True,
            num_splits=0,
        )
        made.append(out)
    return made


def main() -> None:
    rows = []
    with torch.inference_mode():
        for name, lengths in steps().items():
            rows += rows_of(name, lengths)
            torch.cuda.empty_cache()
    version = fa3_attention.installed_version()
    print(f"{fa3_attention.PACKAGE} {version}" if version else f"{fa3_attention.PACKAGE} is not installed")
    write_record("gpu_attention_ways", rows)
    asked = Asked()
    asked.attentions.add(HEADS)
    for one in measure(asked, window=WINDOW, device=torch.device("cuda")):
        told = ", ".join(f"{way} {us:.1f} us" for way, us in one.us.items())
        print(f"{one.step.kind:7}{one.step.tokens:>6} tokens: {one.way:7} of {told}")


if __name__ == "__main__":
    main()
