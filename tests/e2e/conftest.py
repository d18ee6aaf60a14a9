"""Artifacts that the end-to-end tests share: a tiny model's, made once a session, and the demo model's."""

from pathlib import Path

import pytest

from ostinato.runtime.compile import compile_model
from tests.support.server_process import ROOT
from tests.support.tiny_models import make_tiny

DEMO = ROOT / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a window of 16384 tokens, so that a request can run for seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny("llama", folder / "model", max_position_embeddings=16384)
    compile_model(model, folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="session")
def demo_artifact() -> Path:
    """The demo model's artifact, where `make serve` has it too; compiled unless it is up to date."""
    if not DEMO.is_file():
        pytest.skip(f"no demo model at {DEMO}; `make test` fetches it")
    out = DEMO.with_name("SmolLM2-135M-Instruct")
    compile_model(DEMO, out)
    return out
