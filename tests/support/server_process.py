"""`ostinato serve` as a user starts it: a real process with a real port and a real engine behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ostinato

ROOT = Path(ostinato.__file__).parent
START_S = 120.0  # on a loaded machine; an idle one needs three seconds
COMMAND = (sys.executable, "-m", "ostinato.tools.main")


class ServerProcess:
    """A running server. `port` is None until `wait_ready`; everything it says is kept in `log_path`."""

    def __init__(
        self, folder: Path, artifact: Path | str, *flags: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.log_path, self._out_path = folder / "stderr.txt", folder / "stdout.txt"
        command = [*COMMAND, "serve", str(artifact), *flags]
        if not any(flag.startswith("--server.port") for flag in flags):
            command.append("--server.port=0")
        with self._out_path.open("wb") as out, self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=log, stdin=subprocess.DEVNULL, cwd=folder, env=environment(env)
            )
        self.port: int | None = None

    @property
    def url(self) -> str:
        """Base address of the API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The HTTP server's process."""
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """The engine's process, its only child."""
        (child,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(child)

    @property
    def log(self) -> str:
        """What it has written to stderr so far."""
        return self.log_path.read_text()

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self._out_path.read_text()

    def wait_ready(self) -> None:
        """Return when it has printed its curl line."""

        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            return "curl -s http://" in self.out

        eventually(is_ready, START_S)
        match = re.search(r"curl -s http://127\.0\.0\.1:(\d+)/", self.out)
        assert match, self.out
        self.port = int(match[1])

    def wait_end(self, seconds: float = 30.0) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def terminate(self) -> None:
        """SIGTERM, as a service manager sends it."""
        self.process.send_signal(signal.SIGTERM)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET; JSON where it is JSON."""
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object, **more: str) -> tuple[int, Any]:
        """Status and JSON of a POST; `body` may be bytes, `more` are headers."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **more}
        return self._ask(urllib.request.Request(self.url + path, raw, headers))

    def metrics(self) -> dict[str, float]:
        """All metrics without labels, by name without the `ostinato_` in front."""
        _, text = self.get("/metrics")
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("ostinato_"): float(value) for name, value in rows if "{" not in name}

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Return when the engine's books are balanced: nothing runs, waits or holds a block."""
        books = ("requests_running", "requests_waiting", "kv_blocks_used")
        eventually(lambda: not any(self.metrics()[name] for name in books), seconds)

    def _ask(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _body(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _body(error)


@contextmanager
def serving(
    folder: Path, artifact: Path | str, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready; on leaving it is told to stop, and killed if it does not."""
    server = ServerProcess(folder, artifact, *flags, env=env)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.terminate()
            try:
                server.wait_end()
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.wait_end()


def run_command(
    *arguments: str,
    folder: Path,
    given: str = "",
    env: Mapping[str, str] | None = None,
    seconds: float = START_S,
) -> subprocess.CompletedProcess[str]:
    """`ostinato ARGUMENTS` from another folder, `given` on stdin, to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=given, capture_output=True, text=True, cwd=folder, env=environment(env), timeout=seconds,
        check=False,
    )  # fmt: skip


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with `more`; ostinato is the one that the tests import."""
    return {**os.environ, **(more or {})}


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    """Return once `condition()` holds; AssertionError when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.02)


def rss_mib(pid: int) -> float:
    """Resident memory of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def _body(response: Any) -> Any:  # Any: HTTPResponse or HTTPError, which share read and headers
    raw = response.read()
    is_json = "json" in response.headers.get("Content-Type", "")
    return json.loads(raw) if is_json else raw.decode()
