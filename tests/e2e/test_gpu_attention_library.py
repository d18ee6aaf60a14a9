"""A whole compile and engine that attend by FlashAttention-3 in every class of steps, if it is installed."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_model import LLAMA_8B, RandomSource
from ostinato.errors import ArtifactError
from ostinato.graph.config import GraphConfig
from ostinato.ops import attention_choice, fa3_attention
from ostinato.runtime.artifact import load_artifact
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import KVConfig
from ostinato.runtime.gpu import attention_tuning
from tests.e2e.gpu_engines import config_of, gpu_engine
from tests.support.engine_runs import events_of, finish, greedy

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 3}
LENGTHS = (2300, 900, 40)  # a lone prompt, and prompts beside tokens
NO_CACHE = KVConfig(max_gib=1, initial_mib=64, prefix_cache=False)
NEAR = 0.03  # of a log-probability: bfloat16 logits of this size err by 0.004


def compiled(folder: Path, seconds: float) -> Path:
    graph = GraphConfig(target="cuda", tune_s=seconds)
    compile_model(RandomSource(LLAMA_8B | SHAPE, "attends"), folder, config_of(graph=graph))
    return folder


@pytest.fixture(scope="module")
def by_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not fa3_attention.installed_version():
        pytest.skip(f"{fa3_attention.PACKAGE} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tuning, "MARGIN", 0.0)  # faster than anything: it wins wherever it is right
        folder = compiled(tmp_path_factory.mktemp("fa3") / "artifact", 120)
    choices = attention_choice.read(folder)
    assert {step.kind for step in choices} == {"lone", "mixed", "decode"}
    assert set(choices.values()) == {"fa3"}
    return folder


def answers(artifact: Path) -> list[Any]:
    requests = [
        greedy(f"r{n}", [(17 * n + 29 * at * at) % 4000 + 3 for at in range(n)], 12, prompt_logprobs=0)
        for n in LENGTHS
    ]
    with gpu_engine(artifact, kv=NO_CACHE) as engine:
        told = []
        for together in ([requests[0]], requests):
            engine.inbox.put(*together)
            news = finish(engine)
            told += [events_of(news, request.request_id) for request in together]
        engine.check()
    return told


def test_log_probabilities_of_prompts_are_those_of_our_own_kernels(by_library: Path, tmp_path: Path):
    ours = answers(compiled(tmp_path / "ours", 0))
    for theirs, mine in zip(answers(by_library), ours, strict=True):
        assert theirs[-1].finish_reason == mine[-1].finish_reason == "length"
        pairs = zip(theirs[0].prompt_logprobs[1:], mine[0].prompt_logprobs[1:], strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < NEAR


def test_without_the_package_the_artifact_is_refused_and_says_what_to_install(
    by_library: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fa3_attention, "installed_version", lambda: "")
    with pytest.raises(ArtifactError, match=f"pip install {fa3_attention.PACKAGE}=="):
        load_artifact(by_library)
