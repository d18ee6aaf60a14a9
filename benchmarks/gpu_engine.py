"""The GPU engine on a model of real shape: decode steps, prefill, offline throughput.

    python -m benchmarks.gpu_engine [--model llama-8b] [--artifact DIR] [--batches 1 8 32 128 256] [--quick]

Without an artifact in DIR the model is compiled first, with random weights.  A decode step is measured at a
context of about 512 tokens, greedy sampling included: as the wall time between steps of the running engine,
and as the time of its captured graph alone; the baseline is all linear layers of the step through the library
under one graph.  Offline: 256 requests of 512 tokens in and 256 out, from the first to the last token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_graphs import captured
from benchmarks.random_model import SHAPES, RandomSource
from benchmarks.record import Row, write_record
from ostinato import log as logs
from ostinato.runtime.artifact import load_artifact
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.frames import Events
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.messages import GenerateRequest, SamplingParams

CONTEXT, STEPS = 512, 48
VLLM = {  # ms per step at context 512, and tok/s; vLLM 0.26 on a machine of this kind, another day
    "decode_ms_b1_bf16": 4.88,
    "decode_ms_b8_bf16": 5.01,
    "decode_ms_b32_bf16": 5.77,
    "decode_ms_b128_bf16": 8.07,
    "decode_ms_b256_bf16": 12.71,
    "offline_tok_s_bf16": 9751.0,
    "prefill_ms_4096_bf16": 104.0,
    "smol_decode_ms_b1": 1.74,
    "smol_decode_ms_b32": 2.18,
}


class Driver:
    """Feeds an engine in this thread and counts what comes out."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine, self._vocab, self._names = engine, vocab_size, 0
        self.tokens = 0

    def submit(self, prompt_tokens: int, max_tokens: int, **sampling: Any) -> None:
        self._names += 1
        generator = torch.Generator().manual_seed(self._names)
        prompt = torch.randint(self._vocab, (prompt_tokens,), generator=generator).tolist()
        params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
        self.engine.inbox.put(
            GenerateRequest(
                request_id=f"r{self._names}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(**params),
            )
        )

    def step(self) -> int:
        """One turn of the engine; tokens that came out."""
        came = 0
        for message in self.engine.step():
            if isinstance(message, Events):
                for event in message.events:
                    if event.error:
                        raise SystemExit(f"a request failed: {event.error}")
                    came += len(event.token_ids)
        self.tokens += came
        return came

    def run(self) -> None:
        while self.engine.has_work or self._waits():
            self.step()

    def _waits(self) -> bool:
        return self.engine.inbox.wait(0)


def decode(driver: Driver, batch: int, **sampling: Any) -> list[float]:
    """Milliseconds of wall time from step to step with `batch` sequences at a context around CONTEXT."""
    for _ in range(batch):
        driver.submit(CONTEXT - STEPS // 2 - 8, STEPS + 40, **sampling)
    driver.step()
    while driver.step() < batch:
        pass
    for _ in range(4):
        driver.step()
    samples = []
    began = time.perf_counter()
    for _ in range(STEPS):
        came = driver.step()
        now = time.perf_counter()
        if came == batch:
            samples.append((now - began) * 1e3)
        began = now
    driver.run()
    return samples


def graph_ms(backend: GpuBackend, batch: int) -> float | None:
    """Milliseconds of the captured step alone; its inputs are those of the last step."""
    graphs = backend._graphs
    shape = next((s for s in graphs._decode if s.tokens >= batch), None)
    replay = graphs._captured.get(shape) if shape else None
    if replay is None:
        return None
    backend.rehearse_inputs(shape, CONTEXT)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    took = []
    for _ in range(7):
        start.record()
        for _ in range(8):
            replay.graph.replay()
        stop.record()
        stop.synchronize()
        took.append(start.elapsed_time(stop) / 8)
    return statistics.median(took)


def library_ms(weights: dict[str, torch.Tensor], batch: int) -> float:
    """All matrices of the model times `batch` rows through F.linear, under one graph."""
    matrices = [w for name, w in weights.items() if w.dim() == 2 and "embed" not in name]
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], dtype=w.dtype, device=w.device) for w in matrices}
    graph = captured(lambda: [F.linear(inputs[w.shape[1]], w) for w in matrices])
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    took = []
    for _ in range(5):
        start.record()
        for _ in range(4):
            graph.replay()
        stop.record()
        stop.synchronize()
        took.append(start.elapsed_time(stop) / 4)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128, 256])
    parser.add_argument("--quick", action="store_true", help="no prefill, no offline run")
    arguments = parser.parse_args()
    logs.setup("INFO")
    folder = arguments.artifact or Path("/tmp") / f"ostinato-{arguments.model}"
    settings = {"graph": {"target": "cuda"}, "kv": {"prefix_cache": False, "headroom_gib": 4.0}}
    config = EngineConfig.model_validate(settings)
    rows: list[Row] = []
    if not (folder / "manifest.json").exists():
        began = time.perf_counter()
        manifest = compile_model(
            RandomSource(SHAPES[arguments.model], arguments.model, "cuda"), folder, config
        )
        print("compile", round(time.perf_counter() - began, 1), manifest.compile_seconds, manifest.proof)
        torch.cuda.empty_cache()
    began = time.perf_counter()
    model = load_artifact(folder)
    load_s = time.perf_counter() - began
    config = config.model_copy(update={"max_model_len": 8192})
    with Engine(model, config) as engine:
        ready_s = time.perf_counter() - began
        print(f"load {load_s:.2f} s, ready {ready_s:.2f} s", flush=True)
        backend = engine._backend
        assert isinstance(backend, GpuBackend)
        while backend.idle():
            pass
        print(f"graphs {backend._graphs.num_captured} in {backend._graphs.seconds:.2f} s", flush=True)
        driver = Driver(engine, model.facts.vocab_size)
        small = "" if arguments.model == "llama-8b" else "smol_"
        for batch in arguments.batches:
            samples = decode(driver, batch)
            metric = f"decode_ms_b{batch}_bf16" if not small else f"smol_decode_ms_b{batch}"
            floor = library_ms(model.weights.tensors(), batch)
            rows.append(Row.of(metric, samples, "ms", floor, "all linears through the library, one graph"))
            alone = graph_ms(backend, batch)
            if alone is not None:
                rows.append(
                    Row.of(f"{metric}_graph", [alone], "ms", statistics.median(samples), "the wall step")
                )
            if metric in VLLM:
                rows.append(
                    Row.of(f"{metric}_vs_vllm", samples, "ms", VLLM[metric], "vLLM 0.26, another day")
                )
            print(
                metric, f"{statistics.median(samples):.3f} ms, graph {alone}, library {floor:.3f}", flush=True
            )
        if not arguments.quick:
            rows += heavy(driver)
        print("eager steps:", dict(backend.eager_steps()), flush=True)
        engine.check()
    write_record(f"gpu_engine_{arguments.model.replace('-', '_')}", rows)


def heavy(driver: Driver) -> list[Row]:
    """Prefill of 4096 tokens, then 256 requests at once."""
    rows, samples = [], []
    for _ in range(6):
        driver.submit(4096, 1)
        began = time.perf_counter()
        driver.run()
        samples.append((time.perf_counter() - began) * 1e3)
    prefill = "prefill_ms_4096_bf16"
    rows.append(Row.of(prefill, samples[1:], "ms", VLLM[prefill], "vLLM 0.26, another day"))
    print(prefill, [round(s, 2) for s in samples], flush=True)
    for _ in range(256):
        driver.submit(512, 256)
    before = driver.tokens
    began = time.perf_counter()
    driver.run()
    rate = (driver.tokens - before) / (time.perf_counter() - began)
    offline = "offline_tok_s_bf16"
    rows.append(Row.of(offline, [rate], "tok/s", VLLM[offline], "vLLM 0.26, another day"))
    print(offline, round(rate), flush=True)
    return rows


if __name__ == "__main__":
    main()
