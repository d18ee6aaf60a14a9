"""Decode and prefill of the demo model on a CPU against transformers, in one run: same threads, same number
type.

    python -m benchmarks.cpu_decode MODEL.gguf [--dtype float32 bfloat16] [--threads 2]

Rows: cpu_decode_tok_s_b1 and _b8 (whole steps of the engine's program, greedy, context about 64), the same
through transformers' `generate`, prefill of 512 tokens for both, and the share of the machine's read
bandwidth that decode reaches at batch 1 (bytes of all weights per token). Runs are interleaved; figures are
medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ostinato.runtime.openmp_spin import shorten_spin

shorten_spin(os.environ)  # as in the server; for both sides, and before torch is loaded

# ruff: noqa: E402
import torch
from torch import Tensor

from benchmarks.record import Row, write_record
from ostinato.ops.step_inputs import StepInputs
from ostinato.runtime.artifact import LoadedModel, load_artifact
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import EngineConfig

ROUNDS, NEW_TOKENS, PROMPT, PREFILL = 5, 32, 32, 512
BLOCK = 16


class Ours:
    """The compiled program with KV planes of its own; positions and slots as the runner makes them."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        dtype = getattr(torch, model.facts.dtype)
        shapes = [
            (layer.kv_heads, size) for layer in model.facts.kv_layers for size in (layer.k_size, layer.v_size)
        ]
        self.planes = [torch.zeros(512, BLOCK, heads, size, dtype=dtype) for heads, size in shapes]

    def step(self, ids: Tensor, start: int) -> Tensor:
        """Feed `ids` [B, N] at position `start` of each sequence; return the last token's logits [B, V]."""
        batch, new = ids.shape
        width = -(-(start + new) // BLOCK)
        tables = torch.arange(batch * 64, dtype=torch.int32).view(batch, 64)[:, :width].contiguous()
        positions = torch.arange(start, start + new)
        slots = tables[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
        inputs = StepInputs(
            ids.reshape(-1), positions.repeat(batch), slots.reshape(-1), tables,
            torch.full((batch,), start + new, dtype=torch.int32),
            torch.arange(batch + 1, dtype=torch.int32) * new,
            torch.arange(1, batch + 1) * new - 1,
        )  # fmt: skip
        return self.model(inputs, self.planes)

    def decode(self, ids: Tensor) -> tuple[float, Tensor]:
        """Seconds for NEW_TOKENS greedy steps after the prompt, and the tokens."""
        tokens = [self.step(ids, 0).argmax(-1)]
        began = time.perf_counter()
        for at in range(NEW_TOKENS):
            tokens.append(self.step(tokens[-1][:, None], ids.shape[1] + at).argmax(-1))
        return time.perf_counter() - began, torch.stack(tokens, 1)


def theirs_decode(model: torch.nn.Module, ids: Tensor) -> tuple[float, Tensor]:
    """Seconds of `generate` for NEW_TOKENS tokens, the prefill taken off by a run that makes one token."""

    def run(new: int) -> tuple[float, Tensor]:
        began = time.perf_counter()
        out = model.generate(  # type: ignore[operator]  # transformers types it as a tensor
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False
        )
        return time.perf_counter() - began, out[:, ids.shape[1] :]

    one, _ = run(1)
    whole, tokens = run(NEW_TOKENS + 1)
    return whole - one, tokens


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.no_grad()
def measure(model_path: Path, dtype: str) -> list[Row]:
    from transformers import AutoModelForCausalLM, GgufConfig

    config = EngineConfig.model_validate({"graph": {"dtype": dtype}})
    with tempfile.TemporaryDirectory() as folder:
        compile_model(model_path, Path(folder) / "artifact", config)
        ours = Ours(load_artifact(Path(folder) / "artifact"))
    theirs = AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    speeds: dict[int, float] = {}
    for batch in (1, 8):
        ids = torch.randint(1000, 40000, (batch, PROMPT), generator=generator)
        samples: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(ROUNDS):
            for name, run in (("ours", ours.decode), ("theirs", lambda x: theirs_decode(theirs, x))):
                samples[name].append(batch * NEW_TOKENS / run(ids)[0])
        speeds[batch] = statistics.median(samples["ours"])
        base = statistics.median(samples["theirs"])
        rows.append(
            Row.of(
                f"cpu_decode_tok_s_b{batch}_{dtype}", samples["ours"], "tok/s", base, "transformers generate"
            )
        )
    rows.append(Row.of(f"cpu_decode_b8_over_b1_{dtype}", [speeds[8]], "tok/s", speeds[1], "own batch 1"))
    ids = torch.randint(1000, 40000, (1, PREFILL), generator=generator)
    prefill: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(ROUNDS):
        prefill["ours"].append(PREFILL / timed(lambda: ours.step(ids, 0)))
        prefill["theirs"].append(PREFILL / timed(lambda: theirs(ids, use_cache=True, logits_to_keep=1)))
    base = statistics.median(prefill["theirs"])
    rows.append(
        Row.of(f"cpu_prefill_512_tok_s_{dtype}", prefill["ours"], "tok/s", base, "transformers forward")
    )
    bytes_per_token = ours.model.manifest.weights_bytes
    reach = [speeds[1] * bytes_per_token / 1e9]
    rows.append(
        Row.of(f"cpu_decode_read_gb_s_b1_{dtype}", reach, "GB/s", read_bandwidth(), "torch.sum over 1 GiB")
    )
    return rows


def read_bandwidth() -> float:
    """GB/s of summing 1 GiB of float32 with the threads in use; the median of 5."""
    data = torch.ones(1 << 28)
    return statistics.median(data.numel() * 4 / timed(data.sum) / 1e9 for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [row for dtype in arguments.dtype for row in measure(arguments.model, dtype)]
    write_record("cpu_decode", rows)


if __name__ == "__main__":
    main()
