"""Kernel variants compiled by several processes at once: `python -m ostinato.runtime.gpu.kernel_workers`.

Triton and NVRTC compile a variant on one core in about half a second, and a model has a hundred. A worker
reads one request a line from its input and writes one answer a line, as JSON; it ends with its input. It
needs no GPU.
"""

from __future__ import annotations

import base64
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any

from ostinato.errors import CompileError
from ostinato.ops.kernel_store import Binary, Variant

MOST = 16  # workers: each imports torch and triton first, 3 s and 0.5 GiB
LONGEST_S = 300  # for one answer, which takes seconds; who takes longer hangs
MOST_DEATHS = 3  # of workers one after the other, each over its first variant


class _RefusedError(ValueError):
    """A compiler's error; the worker lives on."""


class _DeadError(ValueError):
    """A worker is gone, or says nothing any more."""


class _Processes:
    """Workers that run, so that whoever ends early ends them all."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False
        self._lock = threading.Lock()

    @contextmanager
    def start(self, said: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
        """One more, which is gone behind it. ValueError: too late."""
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with self._lock:
            if self._is_over:
                raise ValueError("the compile has ended")
            process = subprocess.Popen(
                [sys.executable, "-m", "ostinato.runtime.gpu.kernel_workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                text=True,
                process_group=0,  # of its own, with the ptxas that it may have started
            )
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:  # nobody kills it once it is waited for: its id may be another's then
                self._running.remove(process)
                _kill(process)  # whatever it still does is of no use
            with suppress(OSError), process:  # what it did not read goes nowhere
                pass

    def end(self) -> None:
        """Kill all; none is started from here on."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """With what it has started: a ptxas that hangs would stay. It was not waited for yet."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def compile_all(
    variants: Sequence[Variant],
    capability: int,
    *,
    workers: int = 0,
    refused: dict[str, str] | None = None,
    until: float = math.inf,
) -> Iterator[tuple[Binary, bytes]]:
    """What each kernel's `compile` gives, in any order. `workers`: 0: as many as there are cores.

    A variant that cannot be compiled, over which a worker dies, or for which it says nothing for `LONGEST_S`,
    is put into `refused` with the reason. Without `refused` it raises CompileError, and so do `MOST_DEATHS`
    workers that die one after the other, and one that cannot be started. None is begun after `until`, a time
    of `time.monotonic`. However it ends, also by Ctrl-C or SIGTERM, no worker is left.
    """
    if not variants or time.monotonic() >= until:
        return
    count = min(workers or min(len(os.sched_getaffinity(0)), MOST), len(variants))
    waiting: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    for variant in sorted(variants, key=lambda v: -len(v.names)):  # the largest kernels take longest
        waiting.put(variant)
    processes = _Processes()
    with ThreadPoolExecutor(count, thread_name_prefix="ostinato-kernels") as threads:
        try:
            for made in threads.map(
                lambda _: _work(processes, waiting, capability, refused, until), range(count)
            ):
                yield from made
        finally:
            processes.end()  # the threads wait for their answers, and the pool for the threads


def _work(
    processes: _Processes,
    waiting: queue.SimpleQueue[Variant],
    capability: int,
    refused: dict[str, str] | None,
    until: float,
) -> list[tuple[Binary, bytes]]:
    """One worker, and another where it dies over a variant that may be refused.

    A failure empties the queue, so that the others end soon.
    """
    made: list[tuple[Binary, bytes]] = []
    asked: list[Variant] = []
    deaths = 0  # of workers that compiled nothing: none can live here
    with tempfile.TemporaryFile() as said:
        try:
            while True:
                before = len(asked)
                try:
                    with processes.start(said) as process:
                        _feed(process, waiting, asked, made, capability, refused, until)
                    break
                except _DeadError as error:
                    deaths = deaths + 1 if len(asked) == before + 1 else 0
                    if refused is None or deaths == MOST_DEATHS:
                        raise
                    refused[asked[-1].key] = f"the compiling process ended: {error}"
        except (OSError, ValueError) as error:
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-3:]
            what = f"kernel {asked[-1].key}" if asked else "kernels"
            raise CompileError(
                f"{what} could not be compiled: {error}; "
                f"the compiling process said: {' / '.join(last) or 'nothing'}"
            ) from error
    return made


def _feed(
    process: subprocess.Popen[str],
    waiting: queue.SimpleQueue[Variant],
    asked: list[Variant],
    made: list[tuple[Binary, bytes]],
    capability: int,
    refused: dict[str, str] | None,
    until: float,
) -> None:
    """Ask one worker until nothing waits. Raises _DeadError over the last variant in `asked`."""
    while time.monotonic() < until:
        try:
            variant = waiting.get_nowait()
        except queue.Empty:
            return
        asked.append(variant)
        try:
            made.append(_ask(process, variant, capability))
        except _RefusedError as error:
            if refused is None:
                raise
            refused[variant.key] = str(error)
        except (OSError, ValueError) as error:
            raise _DeadError(str(error)) from error


def _ask(process: subprocess.Popen[str], variant: Variant, capability: int) -> tuple[Binary, bytes]:
    """Raises ValueError or OSError: the worker failed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([capability, *variant]) + "\n")
    process.stdin.flush()
    answers = select.poll()  # takes descriptors above 1023, which `select.select` does not
    answers.register(process.stdout, select.POLLIN)
    if not answers.poll(LONGEST_S * 1000):  # nothing is buffered: an answer is a line
        raise ValueError(f"no answer in {LONGEST_S} s")
    line = process.stdout.readline()
    if not line:
        raise ValueError("no answer")
    answer = json.loads(line)
    if "error" in answer:
        raise _RefusedError(answer["error"])
    return Binary.model_validate(answer["binary"]), base64.b64decode(answer["cubin"])


def _answer(request: list[Any]) -> dict[str, Any]:
    capability, key, module, function, names, kinds, options = request
    variant = Variant(
        key, module, function, tuple(names), tuple((kind, value) for kind, value in kinds), tuple(options)
    )
    binary, cubin = getattr(import_module(module), function).compile(variant, capability)
    return {"binary": binary.model_dump(mode="json"), "cubin": base64.b64encode(cubin).decode()}


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints shall not be taken for an answer
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:  # a process border: the parent raises it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
