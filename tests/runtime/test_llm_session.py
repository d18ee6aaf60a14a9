"""A session starts its engine and reads its tokenizer at once, and ends well when either fails."""

import asyncio
import threading

import pytest

from ostinato.errors import ArtifactError, ConfigError
from ostinato.runtime.config import EngineConfig, ServerConfig
from ostinato.runtime.llm_session import Session
from ostinato.runtime.text import TextFrontEnd
from tests.support.fake_engine import FakeEngine, info
from tests.support.toy_text import front_end

PATIENCE_S = 10


class Waiting(FakeEngine):
    """Starts when the tokenizer is being read."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(lambda request: [], info(vocab_size=400))
        self.is_read, self.error, self.closings = threading.Event(), error, 0

    async def start(self) -> None:
        if not await asyncio.to_thread(self.is_read.wait, PATIENCE_S):
            raise TimeoutError("the tokenizer was not read while the engine started")
        if self.error:
            raise self.error
        await super().start()

    async def close(self) -> None:
        self.closings += 1
        await super().close()


def reads(engine: Waiting, error: Exception | None = None) -> TextFrontEnd:
    engine.is_read.set()
    if error:
        raise error
    return front_end()


def test_the_tokenizer_is_read_while_the_engine_starts():
    engine = Waiting()
    session = Session(engine, EngineConfig())
    session.open(lambda: reads(engine))
    assert engine.started
    assert session.text.encode("yes")
    session.close()
    assert engine.closings == 1
    with pytest.raises(RuntimeError, match="after shutdown"):  # the tokenizer's threads are gone
        asyncio.run(session.text.off_loop(str))


@pytest.mark.parametrize("of_engine", [None, ConfigError("no memory")], ids=["alone", "and the engine"])
def test_a_tokenizer_that_cannot_be_read_ends_the_engine(of_engine: Exception | None):
    engine = Waiting(of_engine)
    session = Session(engine, EngineConfig())
    with pytest.raises(ArtifactError, match="broken"):
        session.open(lambda: reads(engine, ArtifactError("broken")))
    session.close()
    assert engine.closings == 1


def test_a_start_that_nobody_waits_for_any_more_is_cancelled(monkeypatch: pytest.MonkeyPatch):
    engine = Waiting()
    has_begun, was_cancelled = threading.Event(), threading.Event()

    async def start() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    def interrupted() -> TextFrontEnd:
        assert has_begun.wait(PATIENCE_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "start", start)
    session = Session(engine, EngineConfig())
    with pytest.raises(KeyboardInterrupt):
        session.open(interrupted)
    assert was_cancelled.wait(PATIENCE_S / 2)
    session.close()


def test_a_damaged_file_is_told_as_the_engine_tells_it_which_has_hashed_it():
    engine = Waiting(
        ArtifactError("tokenizer.json: 500 bytes, the manifest says 9130; compile the model again")
    )
    session = Session(engine, EngineConfig())
    with pytest.raises(ArtifactError, match="the manifest says 9130"):
        session.open(lambda: reads(engine, ArtifactError("not a readable tokenizer")))
    session.close()


def test_an_engine_that_cannot_start_says_why():
    engine = Waiting(ConfigError("no memory"))
    session = Session(engine, EngineConfig())
    with pytest.raises(ConfigError, match="no memory"):
        session.open(lambda: reads(engine))
    session.close()


def test_marks_of_thoughts_that_are_wrong_are_told_at_once():
    engine = Waiting()
    config = EngineConfig(server=ServerConfig(reasoning_start_str="<a>"))
    session = Session(engine, config)
    with pytest.raises(ConfigError, match=r"server\.reasoning_start_str='<a>'"):
        session.open(lambda: reads(engine))
    session.close()
    assert engine.closings == 1
