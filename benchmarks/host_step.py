"""What the host costs per decode step, by part, with a device that does nothing. Needs no GPU.

    python -m benchmarks.host_step [--parts]

Times are CPU time of the threads concerned, in us per step (one token per sequence), the median of rounds;
neither waiting nor other processes count, except through shared caches.

    engine    one turn of the engine's loop: plan, launch, settle, events
    thread    the same through `LLM.generate`: the engine's thread and the loop's, text included
    worker    what the engine process adds to `engine`: frames out
    parent    what the server's process does: frames in, events to 1 reader per sequence
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.record import Row, write_record
from ostinato.runtime import engine_thread
from ostinato.runtime.frames import FrameReader, FrameWriter
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.request_streams import StreamingClient
from tests.support.no_gpu import HostEngine, NoModel, config, request
from tests.support.toy_text import front_end

BATCHES = (1, 32, 256)
ROUNDS, STEPS, WARM = 9, 40, 20
GOALS_US = {1: 150, 32: 350, 256: 1500}  # of all host work of a step; 32: on the way between the others


def timed(steps: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> list[float]:
    """us per call, by round."""
    for _ in range(WARM):
        steps()
    samples = []
    for _ in range(ROUNDS):
        began = clock()
        for _ in range(STEPS):
            steps()
        samples.append((clock() - began) / STEPS * 1e6)
    return samples


@contextmanager
def decoding(batch: int) -> Iterator[HostEngine]:
    """An engine with `batch` sequences that decode for as long as is needed."""
    with HostEngine(NoModel(), config()) as engine:
        engine.inbox.put(*(request(f"request-{at}", WARM + ROUNDS * STEPS + 100) for at in range(batch)))
        for _ in range(4):
            engine.step()
        yield engine


def engine_us(batch: int) -> list[float]:
    with decoding(batch) as engine:
        return timed(engine.step)


def parts_us(batch: int) -> dict[str, float]:
    """Where a turn of the engine spends its time; a part's own time, without the parts inside it."""
    spent: dict[str, float] = defaultdict(float)
    inside: list[float] = []
    watched_parts: set[str] = set()

    def watch(owner: Any, name: str, part: str) -> None:
        plain = getattr(owner, name)
        watched_parts.add(part)

        def watched(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            began = time.thread_time()
            try:
                return plain(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                spent[part] += took - inside.pop()
                if inside:
                    inside[-1] += took

        setattr(owner, name, watched)

    with decoding(batch) as engine:
        backend: Any = engine._backend
        scheduler: Any = engine._scheduler
        watch(engine, "step", "turn: the rest")
        watch(engine._sizer, "grow", "plan: KV memory")
        watch(scheduler, "blocks_wanted", "plan: blocks wanted")
        watch(scheduler, "next_plan", "plan: entries")
        watch(backend, "launch", "launch: the rest")
        watch(backend._graphs, "fit", "launch: fit")
        watch(backend._buffers, "fill", "launch: fill")
        watch(backend._buffers, "send", "launch: send")
        watch(backend._sampler, "stage", "launch: stage")
        watch(engine, "_settle", "settle: result, events")
        watch(scheduler, "complete", "settle: complete")
        for _ in range(WARM):
            engine.step()
        spent.clear()
        for _ in range(ROUNDS * STEPS):
            engine.step()
    if idle := sorted(watched_parts - spent.keys()):
        raise RuntimeError(f"never called: {', '.join(idle)}; its row would be missing from the record")
    return {part: took / (ROUNDS * STEPS) * 1e6 for part, took in sorted(spent.items())}


def worker_us(batch: int) -> list[float]:
    """Frames of a step, written to a socket that is read in between."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    writer, spent = FrameWriter(ours), [0.0]
    with ours, theirs, decoding(batch) as engine:

        def step() -> None:
            news = engine.step()
            began = time.thread_time()
            writer.send(news)
            spent[0] += time.thread_time() - began
            theirs.recv(1 << 20)

        return timed(step, clock=lambda: spent[0])


class _Reader(StreamingClient):
    """A client whose engine was recorded."""

    def _post(self, message: object) -> None:
        pass


def parent_us(batch: int) -> list[float]:
    """A recorded answer, frame by frame, to one reader per sequence."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    writer, frames = FrameWriter(ours), []
    with ours, theirs, decoding(batch) as engine:
        info = engine.info
        for _ in range(WARM + ROUNDS * STEPS):
            writer.send(engine.step())
            frames.append(theirs.recv(1 << 20))
    client, reader, supply = _Reader(), FrameReader(), iter(frames)
    client._info = info
    read = [0]

    async def consume(name: str) -> None:
        async for event in client.generate(request(name, 10_000)):
            read[0] += len(event.token_ids)

    async def answer() -> list[float]:
        tasks = [asyncio.create_task(consume(f"request-{at}")) for at in range(batch)]
        await asyncio.sleep(0)
        samples, spent = [], 0.0
        for index, frame in enumerate(supply):
            began = time.thread_time()
            client._deliver(reader.feed(frame))
            while read[0] < batch * (index + 1):
                await asyncio.sleep(0)
            spent += time.thread_time() - began
            if index >= WARM and (index - WARM) % STEPS == STEPS - 1:
                samples.append(spent / STEPS * 1e6)
            if index < WARM or (index - WARM) % STEPS == STEPS - 1:
                spent = 0.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return samples

    return asyncio.run(answer())


def thread_us(batch: int) -> tuple[list[float], list[float]]:
    """CPU time and wall time of `LLM.generate`, per step: what 400 steps more take."""
    short, long = 100, 500
    cpu, wall = [], []
    with patch.object(engine_thread, "Engine", HostEngine):
        client = engine_thread.EngineThread("nothing", config(), load=lambda *_: NoModel())
        with LLM.over(client, front_end(), config()) as llm:
            prompts = [list(request(str(at), 1).prompt_token_ids) for at in range(batch)]

            def took(tokens: int) -> tuple[float, float]:
                params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
                began, awake = time.perf_counter(), time.process_time()
                llm.generate(prompts, params, progress=False)
                return time.process_time() - awake, time.perf_counter() - began

            took(short)
            for _ in range(5):
                less, more = took(short), took(long)
                cpu.append((more[0] - less[0]) / (long - short) * 1e6)
                wall.append((more[1] - less[1]) / (long - short) * 1e6)
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", action="store_true", help="print where the engine's turn spends its time")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    arguments = parser.parse_args()
    rows = []
    none = "none: the device does nothing"
    for batch in arguments.batches:
        goal = GOALS_US.get(batch)
        cpu, wall = thread_us(batch)
        rows += [
            Row.of(f"host_engine_us_b{batch}", engine_us(batch), "us/step", goal, "goal for the whole host"),
            Row.of(f"host_thread_us_b{batch}", cpu, "us/step", goal, "goal for the whole host"),
            Row.of(f"host_thread_wall_us_b{batch}", wall, "us/step", None, none),
            Row.of(f"host_worker_us_b{batch}", worker_us(batch), "us/step", None, none),
            Row.of(f"host_parent_us_b{batch}", parent_us(batch), "us/step", None, none),
        ]
        if arguments.parts:
            for part, took in parts_us(batch).items():
                print(f"  batch {batch:3}  {part:28} {took:8.1f} us")
    write_record("host_step", rows)


if __name__ == "__main__":
    main()
