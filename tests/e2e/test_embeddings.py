"""Embeddings and scores through artifact, engine and server are transformers', alone and in company."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from ostinato import LLM, ContextTooLong, WrongTask
from ostinato.graph.config import GraphConfig
from ostinato.ops import native
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import EngineConfig, SchedulerConfig
from tests.support.server_process import ROOT, serving
from tests.support.tiny_encoders import hidden_states, make_encoder, pair_score, words

MINILM = ROOT / ".cache" / "all-MiniLM-L6-v2"
CLOSE = 1e-5  # float32, two orders of summation, numbers up to 0.3
TEXTS = [
    "A man is eating food.",
    "hello",
    "Someone in a gorilla costume is playing a set of drums. " * 12,
    "A cheetah is running behind its prey.",
    "Ein Mann isst etwas. 一个人在吃东西 🍕",
]


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_built_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library is the same for every model; a build takes seconds."""
    build, kept = native.build, tmp_path_factory.mktemp("kernels") / "kernels.so"
    made: list[native.BuildInfo] = []

    def build_or_copy(out: Path) -> native.BuildInfo:
        if not made:
            made.append(build(kept))
        shutil.copy(kept, out)
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "build", build_or_copy)
        yield


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the real model."""
    if not MINILM.is_dir():
        pytest.skip(f"no model at {MINILM}; `make test` fetches it")
    out = tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2"
    compile_model(MINILM, out)
    return out


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """Vectors of `TEXTS` as sentence-transformers makes them: mean of the hidden states, length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM).eval()
    vectors = []
    with torch.no_grad():
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt", truncation=False, padding=False)
            vectors.append(torch.nn.functional.normalize(model(**ids).last_hidden_state[0].mean(0), dim=0))
    return vectors


@pytest.fixture(scope="module")
def llm(minilm: Path) -> Iterator[LLM]:
    with LLM(minilm, scheduler={"max_step_tokens": 200}) as llm:
        yield llm


def vectors(llm: LLM, texts: list[str], **options: object) -> Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(texts, progress=False, **options)])


@pytest.mark.demo
def test_vectors_of_the_real_model_are_transformers_alone_and_together(llm: LLM, expected: list[Tensor]):
    together = vectors(llm, TEXTS)
    alone = torch.cat([vectors(llm, [text]) for text in TEXTS])
    assert (together - torch.stack(expected)).abs().max() < CLOSE
    assert (alone - together).abs().max() < CLOSE
    assert llm.stats.steps >= 2  # 200 tokens a step: they did not all fit into one


@pytest.mark.demo
def test_what_is_alike_is_close(llm: LLM):
    corpus = [
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "The girl is carrying a baby.",
        "A man is riding a horse.",
        "A woman is playing violin.",
    ]
    scores = [output.outputs.score for output in llm.score("A man is eating pasta.", corpus, progress=False)]
    assert sorted(range(5), key=lambda at: -scores[at]) == [0, 1, 3, 4, 2]
    assert scores[:2] == pytest.approx([0.7035, 0.5272], abs=2e-4)  # as sentence-transformers' page has it


@pytest.mark.demo
def test_long_inputs_are_refused_or_cut_with_their_special_tokens(llm: LLM):
    long = "word " * 400
    with pytest.raises(ContextTooLong, match="402 tokens and this model's maximum context length is 256"):
        llm.embed(long, progress=False)
    (cut,) = llm.embed(long, truncate_prompt_tokens=-1, progress=False)
    assert len(cut.prompt_token_ids) == 256
    assert (cut.prompt_token_ids[0], cut.prompt_token_ids[-1]) == (101, 102)
    (few,) = llm.embed(long, truncate_prompt_tokens=5, dimensions=16, progress=False)
    assert few.prompt_token_ids == (101, 2773, 2773, 2773, 102)
    assert torch.tensor(few.outputs.embedding).norm() == pytest.approx(1.0)
    with pytest.raises(WrongTask, match="cannot generate: it is a model to embed with"):
        llm.generate(long)


@pytest.mark.demo
def test_the_official_client_gets_the_same_vectors_from_a_server(
    minilm: Path, expected: list[Tensor], tmp_path: Path
):
    with (
        serving(tmp_path, minilm) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert "/v1/embeddings" in server.out
        model = client.models.list().data[0].id
        packed = client.embeddings.create(model=model, input=TEXTS)
        plain = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="float", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="it is a model to embed with"):
            client.completions.create(model=model, prompt="x")
        server.wait_idle()
    found = torch.tensor([one.embedding for one in packed.data])
    assert (found - torch.stack(expected)).abs().max() < CLOSE
    tokens = sum(map(len, AutoTokenizer.from_pretrained(MINILM)(TEXTS, truncation=False)["input_ids"]))
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == tokens
    short = torch.nn.functional.normalize(expected[0][:8], dim=0)
    assert (torch.tensor(plain.data[0].embedding) - short).abs().max() < CLOSE


def test_scores_of_a_cross_encoder_are_transformers(tmp_path: Path):
    model = make_encoder("bert", tmp_path / "model", task="score")
    compile_model(tmp_path / "model", tmp_path / "scorer")
    documents = [words(5, 6, 7), words(*range(20, 60)), words(9)]
    with LLM(tmp_path / "scorer", config=EngineConfig(scheduler=SchedulerConfig(max_step_tokens=60))) as llm:
        outputs = llm.score(words(8, 9), documents, progress=False)
        raw = llm.score(words(8, 9), documents, use_activation=False, progress=False)
        with pytest.raises(WrongTask, match="cannot embed: it is a model to score with"):
            llm.embed("x")
    for output, bare, document in zip(outputs, raw, documents, strict=True):
        ids = [2, 8, 9, 3, *(int(word[1:]) for word in document.split()), 3]
        assert list(output.prompt_token_ids) == ids
        truth = pair_score(model, ids, [0] * 4 + [1] * (len(ids) - 4))
        assert bare.outputs.score == pytest.approx(truth, abs=CLOSE)
        assert output.outputs.score == pytest.approx(1 / (1 + torch.e**-truth), abs=CLOSE)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_vectors(tmp_path: Path):
    model = make_encoder("modernbert", tmp_path / "model")
    compile_model(tmp_path / "model", tmp_path / "embedder", EngineConfig(graph=GraphConfig(target="cuda")))
    texts = [words(5, 6, 7), words(*range(20, 60)), words(9)]
    with LLM(tmp_path / "embedder", scheduler={"max_step_tokens": 40}) as llm:
        outputs = llm.embed(texts, normalize=False, progress=False)
    for output in outputs:
        truth = hidden_states(model, output.prompt_token_ids).mean(0)
        assert (torch.tensor(output.outputs.embedding) - truth).abs().max() < 10 * CLOSE  # numbers up to 4
