"""`ostinato bench startup PATH`: from the start of `ostinato serve` to ready, and to the first token."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ostinato.bench.confidence import over_runs
from ostinato.bench.load_item import LoadItem
from ostinato.bench.ready import find_model
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.results import OutputSettings, make_result, save_result
from ostinato.bench.sender import Sender, open_session
from ostinato.bench.target import TargetSettings
from ostinato.errors import ConfigError
from ostinato.tools.bench_flags import add_section, read_section
from ostinato.tools.bench_report import shown

_POLL_S = 0.002
_STOP_S = 30.0
_NUMBERS = (
    ("ready_s", "start to ready to answer, s"),
    ("first_token_s", "first request to first token, s"),
    ("total_s", "start to first token, s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="artifact, model folder or GGUF file")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="starts (default: 3)")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, metavar="X", help="a start may take so long (default: 600)"
    )
    parser.add_argument(
        "--prompt", default="Hello", metavar="TEXT", help="of the first request (default: Hello)"
    )
    parser.add_argument(
        "--serve-flags",
        default="",
        metavar="FLAGS",
        help="flags of `ostinato serve`, in one word: '--a=1 --b=2'",
    )
    add_section(parser, OutputSettings, leave_out=("save_requests", "plot", "progress"))


def run(arguments: argparse.Namespace) -> int:
    output = read_section(arguments, OutputSettings)
    if arguments.runs < 1:
        raise ConfigError(f"--runs {arguments.runs}: must be at least 1")
    flags = shlex.split(arguments.serve_flags)
    if any(flag.startswith(("--server.port", "--server.host")) for flag in flags):
        raise ConfigError("--serve-flags: leave server.port and server.host out; bench startup chooses them")
    command = [sys.executable, "-m", "ostinato.tools.main", "serve", arguments.path, *flags]
    summaries = []
    for number in range(arguments.runs):
        summaries.append(start_once(command, arguments.prompt, arguments.limit_s))
        print(f"run {number + 1}: " + ", ".join(f"{name} {summaries[-1][name]:.3f}" for name, _ in _NUMBERS))
    numbers = over_runs(summaries)
    points = [{"runs": summaries, "over_runs": numbers}]
    settings = {"path": os.path.basename(arguments.path), "serve_flags": flags}
    save_result(make_result("startup", settings, points, output), output)
    for name, words in _NUMBERS:
        print(f"{words:34} {shown(numbers[name])}")
    return 0


def start_once(command: Sequence[str], prompt: str, limit_s: float) -> dict[str, Any]:
    """Start a server, ask for one token, stop it. ConfigError when it ends or answers nothing in time."""
    port = _free_port()
    began = time.monotonic()
    server = subprocess.Popen(
        [*command, f"--server.port={port}"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        ready_s = _until_open(server, port, began, limit_s)
        first_token_s = asyncio.run(_first_token(port, prompt, limit_s))
        return {"ready_s": ready_s, "first_token_s": first_token_s, "total_s": ready_s + first_token_s}
    finally:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _until_open(server: subprocess.Popen[bytes], port: int, began: float, limit_s: float) -> float:
    """The port is open exactly when the engine is ready: `ostinato serve` listens no earlier."""
    while time.monotonic() - began < limit_s:
        if (code := server.poll()) is not None:
            raise ConfigError(
                f"`ostinato serve` ended with {code} before it was ready; what it said is above"
            )
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return time.monotonic() - began
        time.sleep(_POLL_S)
    raise ConfigError(f"`ostinato serve` was not ready within {limit_s:g} s; see --limit-s")


async def _first_token(port: int, prompt: str, limit_s: float) -> float:
    target = TargetSettings(
        url=f"http://127.0.0.1:{port}",
        backend="openai",
        api_key=os.environ.get("OSTINATO_API_KEY", ""),
        timeout_s=limit_s,
    )
    async with open_session(target) as http:
        model = await find_model(http, target)
        record = RequestRecord(0)
        await Sender(http, target, model).send(LoadItem([prompt], 1), record)
    if not record.ok or record.first_token_at is None:
        raise ConfigError(f"the first request failed: {record.error or 'no token came'}")
    return record.first_token_at


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
