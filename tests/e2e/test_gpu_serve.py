"""Servers on one GPU: no kernel compiler in reach, and two engines that share its memory."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.test_serve_alone import POISON
from tests.support.gpu_models import prompt_ids
from tests.support.server_process import ServerProcess, eventually, serving

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
# `import triton` alone brings in its compiler, so neither may be asked for; nor may NVRTC.
NO_KERNEL_COMPILER = ("triton.compiler", "triton.backends", "cuda.bindings.nvrtc", "cuda.core", "nvrtc")
KEY = {"Authorization": "Bearer root"}
ROOM_GIB = 3  # of KV memory for both servers together


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def servers(float32: Path, folder: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two that give idle memory to each other; compilers raise in them, and PATH is empty."""
    poison, empty = folder / "poison", folder / "bin"
    poison.mkdir()
    empty.mkdir()
    forbidden = POISON.replace('"gguf")', f'"gguf", {str(NO_KERNEL_COMPILER)[1:]}')
    assert "triton.compiler" in forbidden
    (poison / "sitecustomize.py").write_text(forbidden)
    path = os.pathsep.join([str(poison), os.environ.get("PYTHONPATH", "")])
    environ = {"PATH": str(empty), "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(folder)}
    free_gib = torch.cuda.mem_get_info()[0] / 2**30
    weights_gib = (float32 / "weights.safetensors").stat().st_size / 2**30
    headroom = free_gib - 2 * (weights_gib + 1.5) - ROOM_GIB  # 1.5 GiB: context, graphs and workspaces of one
    flags = [
        "--kv.share", f"--kv.headroom-gib={headroom:.2f}", "--kv.idle-shrink-s=1", "--kv.initial-mib=256",
        "--scheduler.max-running=64", "--server.admin-key=root",
    ]  # fmt: skip
    homes = [folder / "one", folder / "two"]
    for home in homes:
        home.mkdir()
    with (
        serving(homes[0], float32, *flags, env=environ) as one,
        serving(homes[1], float32, *flags, env=environ) as two,
    ):
        yield one, two


def load(server: ServerProcess, seed: int) -> list[float]:
    """Log-probabilities of what 32 requests of 600 tokens get: about 0.9 GiB of KV memory in float32."""
    prompts = [list(prompt_ids(600, 100 * seed + at)) for at in range(32)]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return [value for choice in answer["choices"] for value in choice["logprobs"]["token_logprobs"]]


def same(values: list[float]) -> object:
    """Equal up to the rounding of float32 in another batch."""
    return pytest.approx(values, abs=1e-3)


def test_two_engines_pass_memory_back_and_forth_under_alternating_load(servers):
    held = []
    first = load(servers[0], 1)
    assert load(servers[1], 1) == same(first)
    for turn in range(6):
        server = servers[turn % 2]
        assert load(server, 1 + turn // 2)
        held.append([other.metrics()["kv_committed_bytes"] for other in servers])
    for server in servers:
        assert load(server, 1) == same(first)
        server.wait_idle()
        assert server.get("/health")[1]["status"] == "ok"
        assert "Traceback" not in server.log
    assert len({tuple(pair) for pair in held}) > 1  # memory did move


def test_a_server_sleeps_and_wakes_by_its_admin_routes(servers):
    server = servers[0]
    before = load(server, 7)
    for level in (1, 2):
        status, state = server.post("/admin/sleep", {"level": level}, **KEY)
        assert (status, state["asleep"], state["weights_bytes"], state["kv_bytes"]) == (200, level, 0, 0)
        eventually(lambda: server.metrics()["asleep"] > 0, 10)
        assert server.post("/admin/wake", {}, **KEY)[0] == 200
        assert load(server, 7) == same(before)
    assert server.metrics()["graph_replays_total"] > 0


def test_serving_has_compiled_nothing_and_asked_for_no_compiler(servers, folder):
    for server in servers:
        assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 8})[0] == 200
        assert server.metrics()["graph_replays_total"] > 0
    pids = [server.engine_pid for server in servers]
    for server in servers:
        server.terminate()
        assert server.wait_end() == 0
    refused = folder / "poison" / "refused.txt"
    assert not refused.exists(), refused.read_text()
    for pid in pids:
        listed = folder / "poison" / f"{pid}.modules"
        eventually(listed.exists, 10)
        modules = json.loads(listed.read_text())
        assert "torch" in modules
        assert not [name for name in modules if name.startswith(NO_KERNEL_COMPILER)]
