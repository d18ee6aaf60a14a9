"""Artifacts that the end-to-end tests share: a tiny model's, made once a session, and the demo model's."""

from pathlib import Path

import pytest

from ostinato.graph.config import GraphConfig
from ostinato.graph.source import ModelSource
from ostinato.runtime.compile import compile_model
from tests.e2e.gpu_engines import config_of
from tests.support.gpu_models import Answer, judged, random_source
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


@pytest.fixture(scope="session")
def judged_model() -> tuple[ModelSource | Path, list[Answer]]:
    """A model in float32 and transformers' answers to its prompts, on a GPU."""
    return judged()


@pytest.fixture(scope="session")
def cases(judged_model: tuple[ModelSource | Path, list[Answer]]) -> list[Answer]:
    """Prompts of 5 to 900 tokens with their greedy answers."""
    return judged_model[1]


@pytest.fixture(scope="session")
def float32(judged_model: tuple[ModelSource | Path, list[Answer]]) -> Path:
    """Its artifact for this GPU; kept, so that a second run finds it."""
    return gpu_artifact(judged_model[0], "float32")


@pytest.fixture(scope="session")
def bfloat16() -> Path:
    """A model of four layers in bfloat16, whose embedding is not its head."""
    return gpu_artifact(random_source(layers=4, dtype="bfloat16"), "bfloat16")


def gpu_artifact(source: ModelSource | Path, dtype: str) -> Path:
    """Compiled as the engines of `gpu_engines` run it."""
    out = ROOT / ".cache" / f"gpu-tests-{dtype}"
    graph = GraphConfig(dtype=dtype, target="cuda")
    compile_model(source, out, config_of(graph=graph))
    return out
