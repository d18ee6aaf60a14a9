"""How a server ends: drained, hurried, or without its engine; and how it refuses to start."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.http_streams import GREEDY, events, text_of
from tests.support.server_process import ServerProcess, eventually, run_command, serving
from tests.support.tiny_models import make_tiny


@contextlib.asynccontextmanager
async def open_streams(
    url: str, count: int, **fields: object
) -> AsyncIterator[list[asyncio.Task[list[Any]]]]:
    """Streams that have given their first event; a task reads each to its end, or to where it is cut off."""
    begun = asyncio.Semaphore(0)

    async def read(http: aiohttp.ClientSession, number: int) -> list[Any]:
        body = {**GREEDY, "stream": True, "prompt": f"hello {number}", **fields}
        got: list[Any] = []
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async with http.post(f"{url}/v1/completions", json=body) as response:
                async for event in events(response):
                    if not got:
                        begun.release()
                    got.append(event)
        return got

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(http, number)) for number in range(count)]
        for _ in tasks:
            await begun.acquire()
        yield tasks


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones(tiny_artifact, tmp_path):
    with serving(tmp_path, tiny_artifact) as server:
        async with open_streams(
            server.url, 3, max_tokens=3000, stream_options={"include_usage": True}
        ) as tasks:
            server.terminate()
            async with asyncio.timeout(10):
                while not await refuses_connections(server):
                    await asyncio.sleep(0.01)
            assert not any(task.done() for task in tasks)
        for task in tasks:
            *_, finish, usage, done = task.result()
            assert (finish["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
            assert usage["usage"]["completion_tokens"] == 3000
        assert await asyncio.to_thread(server.wait_end) == 0
    assert "Traceback" not in server.log


async def test_a_second_sigterm_ends_at_once_and_tells_the_clients(tiny_artifact, tmp_path):
    with serving(tmp_path, tiny_artifact) as server:
        async with open_streams(server.url, 2, max_tokens=15_000) as tasks:
            server.terminate()
            await asyncio.to_thread(eventually, lambda: "shutting down" in server.log, 10)
            began = time.monotonic()
            server.terminate()
        assert await asyncio.to_thread(server.wait_end) == 0
        assert time.monotonic() - began < 10  # far from the 30 s of the drain
        for task in tasks:
            assert task.result()[-1]["error"]["code"] == "aborted"
    assert "Traceback" not in server.log


async def test_a_killed_engine_fails_open_streams_and_health_and_the_server_says_why(tiny_artifact, tmp_path):
    with serving(tmp_path, tiny_artifact) as server:
        async with open_streams(server.url, 2, max_tokens=15_000) as tasks:
            os.kill(server.engine_pid, signal.SIGKILL)
        for task in tasks:
            error = task.result()[-1]["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_dead")
            assert "killed by SIGKILL" in error["message"]
            assert text_of(task.result()[:-1])  # what came before is whole events
        status, health = server.get("/health")
        assert (status, health["status"]) == (503, "dead")
        assert "SIGKILL" in health["reason"]
        status, answer = server.post("/v1/completions", {"prompt": "hello"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        server.terminate()
        assert await asyncio.to_thread(server.wait_end) == 0
    assert "Traceback" not in server.log


async def test_an_engine_without_its_server_ends(tiny_artifact, tmp_path):
    with serving(tmp_path, tiny_artifact) as server:
        engine = server.engine_pid
        async with open_streams(server.url, 1, max_tokens=15_000) as tasks:
            server.process.kill()
        assert tasks[0].result()[-1] != "[DONE]"
        await asyncio.to_thread(eventually, lambda: not Path(f"/proc/{engine}").exists(), 15)


async def refuses_connections(server: ServerProcess) -> bool:
    """No new connection is accepted."""
    assert server.port is not None
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return False


def refusal(*arguments: str, folder: Path) -> str:
    """The one line that `ostinato serve` ends with when it cannot start."""
    done = run_command("serve", *arguments, "--log-level=ERROR", folder=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ostinato: ")
    return lines[0]


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal("no/such/model", f"--server.port={port}", folder=tmp_path)
    assert f"server.port={port}: in use on 127.0.0.1" in said


def test_two_servers_that_start_on_one_port_at_once_do_not_both_live(tiny_artifact, tmp_path):
    with socket.socket() as other:  # what a server has while it loads: bound, not listening yet
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        server = ServerProcess(tmp_path, tiny_artifact, f"--server.port={port}", "--log-level=ERROR")
        eventually(lambda: bool(children(server.pid)), 30)
        other.listen()
        assert server.wait_end() == 2
    assert server.log.startswith("ostinato: server.port=")
    assert f"{port}: in use" in server.log
    assert server.log.count("\n") == 1


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_sigterm_while_it_compiles_ends_the_compile_too_and_leaves_nothing_half_made(tmp_path):
    model = make_tiny("llama", tmp_path / "model")
    cache = tmp_path / "cache"
    server = ServerProcess(tmp_path, model, env={"XDG_CACHE_HOME": str(cache)})
    eventually(lambda: bool(list(cache.glob("ostinato/.*.partial"))), 60)
    (compiler,) = children(server.pid)
    server.terminate()
    assert server.wait_end() == 143
    assert not Path(f"/proc/{compiler}").exists()
    assert list(cache.glob("ostinato/*")) == [] == list(cache.glob("ostinato/.*.partial"))
    assert "Traceback" not in server.log


def test_a_missing_artifact_is_named(tmp_path):
    assert "no/such/model" in refusal("no/such/model", "--server.port=0", folder=tmp_path)


@pytest.fixture
def copy(tiny_artifact, tmp_path) -> Path:
    return shutil.copytree(tiny_artifact, tmp_path / "copy")


def test_a_damaged_artifact_is_refused_and_the_file_named(copy):
    weights = copy / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    assert "weights.safetensors: content does not match" in refusal(
        str(copy), "--server.port=0", folder=copy.parent
    )


def test_an_artifact_of_another_torch_is_refused_with_both_versions(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    ours = manifest["torch"]
    (copy / "manifest.json").write_text(json.dumps({**manifest, "torch": "2.5.1"}))
    said = refusal(str(copy), "--server.port=0", folder=copy.parent)
    assert f"torch: artifact 2.5.1, here {ours}" in said


def test_half_an_artifact_is_refused(copy):
    (copy / "program.json").unlink()
    said = refusal(str(copy), "--server.port=0", folder=copy.parent)
    assert "program.json is missing" in said


def test_an_unknown_setting_is_refused(tmp_path):
    assert "kv.block_tokens='0'" in refusal("x", "--kv.block-tokens=0", folder=tmp_path)
