"""The engine in a child process, on the toy model: work, death on either side, bad starts, clean ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio

import ostinato
from ostinato.errors import ArtifactError, ConfigError, ContextTooLong, EngineDead, InvalidRequest, Overloaded
from ostinato.runtime.config import CpuConfig, SchedulerConfig
from ostinato.runtime.engine_process import EngineProcess
from tests.support.engine_runs import greedy, prompt_of, toy_config
from tests.support.toy_model import ToyModel

TOY = ToyModel()
ROOT = Path(ostinato.__file__).parent
SOON_S = 10.0  # a loaded machine; what is waited for takes milliseconds on an idle one


pytestmark = pytest.mark.asyncio(
    loop_scope="module"
)  # a child takes seconds to import torch: most tests share one


@pytest.fixture(autouse=True, scope="module")
def _child_finds_the_tests():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    """An engine that takes 20 ms for a step, runs four requests and lets four wait."""
    async with running("slow", scheduler=SchedulerConfig(max_running=4, max_waiting=4)) as client:
        yield client


@contextlib.asynccontextmanager
async def running(artifact="toy", **settings):
    client = EngineProcess(artifact, toy_config(**settings), worker="tests.support.toy_worker")
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def collect(client, request):
    return [event async for event in client.generate(request)]


async def eventually(condition):
    for _ in range(int(SOON_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def tokens(events):
    return [token for event in events for token in event.token_ids]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_requests_run_together_and_the_engine_tells_its_facts_and_books(shared):
    client, before = shared, shared.stats
    assert client.info.vocab_size == 512
    assert client.info.max_model_len == 512
    assert client.info.load_seconds > 0
    requests = [greedy(f"r{n}", prompt_of(n, n)) for n in (1, 16, 33, 70)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests))
    for request, events in zip(requests, answers, strict=True):
        assert tokens(events) == TOY.greedy(request.prompt_token_ids, 8)
        assert [event.finish_reason for event in events][-1] == "length"
    await eventually(lambda: client.stats.running == 0)
    assert client.stats.generated_tokens - before.generated_tokens == 32
    assert client.stats.blocks_used == 0
    assert client.stalled_seconds == 0.0


async def test_refusals_are_raised_before_and_behind_the_border(shared):
    client = shared
    with pytest.raises(InvalidRequest, match="empty"):
        await collect(client, greedy("a", []))
    with pytest.raises(ContextTooLong, match="512 tokens") as refusal:
        await collect(client, greedy("b", prompt_of(600)))
    assert refusal.value.param == "prompt"
    crowd = [collect(client, greedy(f"c{i}", [5, 6], 2)) for i in range(30)]
    results = await asyncio.gather(*crowd, return_exceptions=True)
    overloaded = [result for result in results if isinstance(result, Overloaded)]
    served = [tokens(result) for result in results if isinstance(result, list)]
    assert overloaded
    assert served
    assert len(overloaded) + len(served) == 30
    assert all(answer == TOY.greedy([5, 6], 2) for answer in served)


async def test_closing_the_iterator_aborts_and_frees_its_blocks(shared):
    before = shared.stats
    stream = shared.generate(greedy("left", [5, 6], 400))
    await anext(stream)
    await stream.aclose()
    await eventually(lambda: shared.stats.steps > before.steps and shared.stats.running == 0)
    assert shared.stats.blocks_used == 0
    assert shared.stats.generated_tokens - before.generated_tokens < 100
    assert shared.stalled_seconds == 0.0


async def test_abort_gives_readers_an_end_and_knows_no_wrong_time(shared):
    stream = shared.generate(greedy("stopped", [5, 6], 400))
    events = [await anext(stream)]
    await shared.abort(["stopped", "unknown"])
    events += [event async for event in stream]
    assert events[-1].finish_reason == "abort"
    assert tokens(events) == TOY.greedy([5, 6], len(tokens(events)))
    await shared.abort(["stopped"])  # just finished
    again = await collect(shared, greedy("stopped", [7], 2))  # the id is free
    assert tokens(again) == TOY.greedy([7], 2)


async def test_an_id_in_use_is_refused_and_the_first_goes_on(shared):
    stream = shared.generate(greedy("same", [5, 6], 20))
    events = [await anext(stream)]
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        await collect(shared, greedy("same", [7]))
    events += [event async for event in stream]
    assert tokens(events) == TOY.greedy([5, 6], 20)


async def test_sigint_and_sigterm_of_the_group_leave_the_child_to_its_parent(shared):
    stream = shared.generate(greedy("r", [5, 6], 20))
    events = [await anext(stream)]
    os.kill(shared.pid, signal.SIGINT)
    os.kill(shared.pid, signal.SIGTERM)
    events += [event async for event in stream]
    assert tokens(events) == TOY.greedy([5, 6], 20)


async def test_a_stall_shows_and_a_killed_child_fails_everything_at_once_and_says_how_it_died():
    async with running("slow") as client:
        waiting = [asyncio.create_task(collect(client, greedy(f"r{i}", [5, i], 400))) for i in range(3)]
        await eventually(lambda: client.stats.running == 3)
        os.kill(client.pid, signal.SIGSTOP)  # what a step that never ends looks like from outside
        await eventually(lambda: client.stalled_seconds > 0.3)
        os.kill(client.pid, signal.SIGKILL)
        began = time.monotonic()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert time.monotonic() - began < SOON_S
        assert all(isinstance(result, EngineDead) for result in results)
        assert "killed by SIGKILL" in str(results[0])
        with pytest.raises(EngineDead, match="SIGKILL"):
            await collect(client, greedy("later", [5]))
        with pytest.raises(EngineDead):
            _ = client.stalled_seconds
        await client.abort(["r0"])


async def test_close_ends_readers_and_child_and_may_be_called_twice():
    async with running("slow") as client:
        reader = asyncio.create_task(collect(client, greedy("r", [5, 6], 400)))
        await eventually(lambda: client.stats.running == 1)
        pid = client.pid
        await client.close()
        await client.close()
        with pytest.raises(EngineDead, match="closed"):
            await reader
        assert not is_alive(pid)


@pytest.mark.parametrize(
    ("artifact", "settings", "error", "says"),
    [
        ("damaged", {}, ArtifactError, "damaged: a flipped byte"),
        ("toy", {"cpu": CpuConfig(threads=1000)}, ConfigError, "cpu.threads=1000"),
        ("raises", {}, EngineDead, "ZeroDivisionError: not one of ours"),
        ("exits", {}, EngineDead, "exit code 7"),
    ],
)
async def test_a_start_that_fails_raises_what_went_wrong_in_the_child(artifact, settings, error, says):
    client = EngineProcess(artifact, toy_config(**settings), worker="tests.support.toy_worker")
    with pytest.raises(error, match=says):
        await client.start()
    assert not is_alive(client.pid)


async def test_the_client_imports_no_torch():
    code = "import sys, ostinato.runtime.engine_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PARENT = """
import asyncio, sys
from tests.support.engine_runs import greedy, toy_config
from ostinato.runtime.engine_process import EngineProcess

async def main():
    client = EngineProcess("slow", toy_config(), worker="tests.support.toy_worker")
    await client.start()
    print(client.pid, flush=True)
    async for event in client.generate(greedy("r", [5, 6], 400)):
        pass

asyncio.run(main())
"""


async def test_the_child_ends_when_its_parent_is_killed_with_requests_running():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    with parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    await eventually(lambda: not is_alive(pid))
