"""The engine on a thread: what only this client has; the rest is tested through `LLM`."""

import asyncio
import threading
import time

import pytest

from ostinato.errors import ConfigError, EngineDead
from ostinato.runtime.engine import Engine
from ostinato.runtime.engine_thread import EngineThread
from tests.support.engine_runs import greedy, toy_config
from tests.support.toy_model import CRASH, ToyModel, load_toy

TOY = ToyModel()


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "ostinato-engine"]


async def test_start_twice_is_an_error_and_close_without_start_is_none():
    client = EngineThread("toy", toy_config(), load=load_toy)
    await client.close()
    client = EngineThread("toy", toy_config(), load=load_toy)
    with pytest.raises(EngineDead, match="not started"):
        _ = client.info
    await client.start()
    with pytest.raises(RuntimeError, match="one EngineThread is one thread"):
        await client.start()
    await client.close()
    assert engine_threads() == []


async def test_a_start_that_fails_raises_the_engines_own_error_and_logs_no_traceback(caplog):
    with pytest.raises(ConfigError, match="max_model_len=9999"):
        await EngineThread("toy", toy_config(max_model_len=9999), load=load_toy).start()
    assert engine_threads() == []
    assert "max_model_len=9999" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_start_that_fails_for_an_unknown_reason_logs_a_traceback(caplog):
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        await EngineThread("raises", toy_config(), load=load_toy).start()
    assert "Traceback" in caplog.text


async def test_a_fatal_error_reaches_every_reader_and_later_ones(monkeypatch, caplog):
    client = EngineThread("toy", toy_config(), load=load_toy)
    await client.start()

    def broken(self):
        raise AssertionError("books do not balance")

    monkeypatch.setattr(Engine, "check", broken)
    with pytest.raises(EngineDead, match="books do not balance"):
        async for _ in client.generate(greedy("r", [CRASH])):
            pass
    with pytest.raises(EngineDead, match="books do not balance"):
        async for _ in client.generate(greedy("later", [5])):
            pass
    with pytest.raises(EngineDead):
        _ = client.stalled_seconds
    await client.close()
    assert "AssertionError" in caplog.text


def test_a_loop_that_ends_without_close_stops_the_engine():
    async def forget():
        client = EngineThread("slow", toy_config(), load=load_toy)
        await client.start()
        stream = client.generate(greedy("r", [5, 6], 400))
        await anext(stream)

    asyncio.run(forget())
    for _ in range(500):
        if not engine_threads():
            return
        time.sleep(0.02)
    raise AssertionError("the engine thread still runs")
