"""The GPU engine on models of real shapes: start, captures, decode steps, prefill, offline throughput.

    python -m benchmarks.gpu_engine [--models llama-8b smollm2-135m] [--batches 1 8 32 128 256]
        [--skip start prefill offline library] [--folder .cache/bench]

Models have random weights; an artifact is compiled into the folder unless it is there and up to date.
- start: a process that imports ostinato (which imports torch when it loads), loads the artifact and gives one
  token, from its start to that token; weights in the page cache.
- capture: time and memory of the device that all captured shapes take.
- decode: wall time between steps of the running engine at a context of about 512 tokens, greedy sampling
  included; of the same steps the GPU's time inside their graphs and between them, where the copies of inputs
  and tokens are, and how long the host waited for the GPU: while it waits the next step is queued.
  Two events are recorded in each of these steps, which cost a few us.
  The baseline is all linear layers of a step through the library under one graph.
- prefill of 4096 tokens; offline: 256 requests of 512 tokens in and 256 out, from first to last token.
One record for each model. All of it takes about four minutes on a fresh machine, two of them for compiling.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.gpu_graphs import captured
from benchmarks.random_model import SHAPES, RandomSource
from benchmarks.record import ROOT, Row, write_record
from ostinato import log as logs
from ostinato.runtime.artifact import load_artifact
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.frames import Events
from ostinato.runtime.gpu.gpu_backend import GpuBackend
from ostinato.runtime.messages import GenerateRequest, SamplingParams

CONTEXT, STEPS = 512, 48
SHORT = {"llama-8b": "8b", "smollm2-135m": "smol"}  # in metrics
BATCHES = {"llama-8b": (1, 8, 32, 128, 256), "smollm2-135m": (1, 32)}
PARTS = ("start", "prefill", "offline", "library")
FROM_VLLM = "vLLM 0.26, another day"
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
    "start_to_first_token_s_8b": 48.0,
    "capture_s_8b": 5.0,
    "capture_mib_8b": 0.99 * 1024,
}
FIRST_TOKEN = """
import sys, time
def tell(what):
    print(f"{{time.time() - {began}:6.2f}} s: {{what}}", file=sys.stderr, flush=True)
tell("python")
from ostinato import LLM, SamplingParams
tell("ostinato")
with LLM({path!r}, log_level={level!r}, max_model_len=8192) as llm:
    tell("ready")
    out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1))
    print("token", out[0].outputs[0].token_ids[0], flush=True)
    tell("first token")
"""


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


def start_rows(folder: Path, short: str) -> list[Row]:
    """Processes that end with their first token; the first of them only fills the page cache."""
    samples = []
    for turn in range(4):
        level = "INFO" if turn == 3 else "ERROR"  # the last one's log says where the time goes
        script = FIRST_TOKEN.format(path=str(folder), level=level, began=time.time())
        error = None if turn == 3 else subprocess.DEVNULL
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=error, text=True
        ) as process:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("token"):
                raise SystemExit("the process that should give one token failed")
            samples.append(time.perf_counter() - began)
    return [against_vllm(f"start_to_first_token_s_{short}", samples[1:], "s")]


class StepTimes:
    """Of decode steps, ms: wall time from one to the next, the GPU's in and between graphs, the host's waits.

    A step's graph is queued before the host waits for the step ahead of it. So where the host waited, the GPU
    had its next work already, and the time between graphs is that of the copies.
    """

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.waits: list[float] = []
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # around each graph

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Graphs that are replayed and events that are waited for here are timed."""
        replay, synchronize = torch.cuda.CUDAGraph.replay, torch.cuda.Event.synchronize

        def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            self._marks.append((begin, end))

        def timed_synchronize(event: torch.cuda.Event) -> None:
            began = time.perf_counter()
            synchronize(event)
            self.waits.append((time.perf_counter() - began) * 1e3)

        with (
            patch.object(torch.cuda.CUDAGraph, "replay", timed_replay),
            patch.object(torch.cuda.Event, "synchronize", timed_synchronize),
        ):
            yield

    @property
    def graphs(self) -> list[float]:
        """Once the device is done."""
        return [begin.elapsed_time(end) for begin, end in self._marks]

    @property
    def gaps(self) -> list[float]:
        """Once the device is done: from the end of a graph to the begin of the next."""
        return [end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(self._marks)]


def decode(driver: Driver, batch: int) -> StepTimes:
    """Times of STEPS steps with `batch` sequences."""
    for _ in range(batch):
        driver.submit(CONTEXT - STEPS // 2 - 8, STEPS + 40)
    driver.step()
    while driver.step() < batch:
        pass
    for _ in range(4):
        driver.step()
    times = StepTimes()
    with times.watched():
        began = time.perf_counter()
        for _ in range(STEPS):
            came = driver.step()
            now = time.perf_counter()
            if came == batch:
                times.wall.append((now - began) * 1e3)
            began = now
    driver.run()
    torch.cuda.synchronize()
    return times


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


def decode_rows(
    driver: Driver, batch: int, short: str, weights: dict[str, torch.Tensor], skip: set[str]
) -> list[Row]:
    metric = f"decode_ms_b{batch}_bf16" if short == "8b" else f"{short}_decode_ms_b{batch}"
    times = decode(driver, batch)
    wall, graphs = statistics.median(times.wall), times.graphs
    floor = None if "library" in skip else library_ms(weights, batch)
    rows = [Row.of(metric, times.wall, "ms", floor, "all linears through the library, one graph")]
    if graphs:
        rows += [
            Row.of(f"{metric}_graph", graphs, "ms", wall, "the wall time of these steps"),
            Row.of(f"{metric}_gap", times.gaps, "ms", wall, "the wall time of these steps"),
            Row.of(f"{metric}_host_waits", times.waits, "ms", wall, "the wall time of these steps"),
        ]
    if metric in VLLM:
        rows.append(against_vllm(f"{metric}_vs_vllm", times.wall, "ms", VLLM[metric]))
    for row in rows:
        print(f"{row.metric}: {row.value} ms, {row.ratio} of {row.baseline_is}", flush=True)
    return rows


def prefill_rows(driver: Driver, short: str) -> list[Row]:
    samples = []
    for _ in range(6):
        driver.submit(4096, 1)
        began = time.perf_counter()
        driver.run()
        samples.append((time.perf_counter() - began) * 1e3)
    return [
        against_vllm(
            "prefill_ms_4096_bf16" if short == "8b" else f"{short}_prefill_ms_4096", samples[1:], "ms"
        )
    ]


def offline_rows(driver: Driver, short: str) -> list[Row]:
    for _ in range(256):
        driver.submit(512, 256)
    before = driver.tokens
    began = time.perf_counter()
    driver.run()
    rate = (driver.tokens - before) / (time.perf_counter() - began)
    return [
        against_vllm("offline_tok_s_bf16" if short == "8b" else f"{short}_offline_tok_s", [rate], "tok/s")
    ]


def against_vllm(metric: str, samples: list[float], unit: str, theirs: float | None = None) -> Row:
    baseline = theirs or VLLM.get(metric)
    print(metric, [round(sample, 3) for sample in samples[:8]], flush=True)
    return Row.of(metric, samples, unit, baseline, FROM_VLLM if baseline else "none measured")


def measure(model_name: str, folder: Path, batches: list[int], skip: set[str]) -> list[Row]:
    """Everything of one model, whose artifact is in `folder` afterwards."""
    short = SHORT[model_name]
    settings = {"graph": {"target": "cuda"}, "kv": {"prefix_cache": False, "headroom_gib": 4.0}}
    config = EngineConfig.model_validate(settings)
    began = time.perf_counter()
    manifest = compile_model(RandomSource(SHAPES[model_name], model_name, "cuda"), folder, config)
    print(f"artifact {time.perf_counter() - began:.1f} s", manifest.compile_seconds, flush=True)
    torch.cuda.empty_cache()
    compiled = Row.of(f"compile_kernels_s_{short}", [manifest.compile_seconds["kernels"]], "s", None, "none")
    rows = [compiled] if "start" in skip else [compiled, *start_rows(folder, short)]
    model = load_artifact(folder)
    with Engine(model, config.model_copy(update={"max_model_len": 8192})) as engine:
        backend = engine._backend
        assert isinstance(backend, GpuBackend)
        while engine._idle():
            pass
        graphs = backend._graphs
        rows.append(against_vllm(f"capture_s_{short}", [graphs.seconds], "s"))
        rows.append(against_vllm(f"capture_mib_{short}", [graphs.bytes / 2**20], "MiB"))
        driver = Driver(engine, model.facts.vocab_size)
        for batch in batches:
            rows += decode_rows(driver, batch, short, model.weights.tensors(), skip)
        if "prefill" not in skip:
            rows += prefill_rows(driver, short)
        if "offline" not in skip:
            rows += offline_rows(driver, short)
        print("eager steps:", dict(backend.eager_steps()), flush=True)
        engine.check()
    model.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="*", help="instead of those of each model")
    parser.add_argument("--skip", nargs="+", default=[], choices=PARTS)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache" / "bench", help="of artifacts; they are kept"
    )
    arguments = parser.parse_args()
    logs.setup("INFO")
    for name in arguments.models:
        batches = list(BATCHES[name]) if arguments.batches is None else arguments.batches
        rows = measure(name, arguments.folder / name, batches, set(arguments.skip))
        write_record(f"gpu_engine_{name.replace('-', '_')}", rows)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
