"""`LLM.embed` and `LLM.score` over a real engine of a toy model."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ostinato.errors import ContextTooLong, InvalidRequest, WrongTask
from ostinato.runtime.config import CpuConfig, EngineConfig, SchedulerConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.llm import LLM
from ostinato.runtime.text import TextFrontEnd
from tests.support.tiny_encoders import tokenizer, words
from tests.support.toy_pool_model import EMBEDS, SCORES, ToyPoolModel, numbers


def over(model: ToyPoolModel) -> LLM:
    config = EngineConfig(cpu=CpuConfig(threads=1, bind=False), scheduler=SchedulerConfig(max_waiting=2))
    engine = EngineThread("toy", config, load=lambda folder, config: model)  # type: ignore[arg-type,return-value]
    return LLM.over(engine, TextFrontEnd(tokenizer()), config)


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    with over(ToyPoolModel(EMBEDS)) as llm:
        yield llm


def unit(*ids: int) -> list[float]:
    vector = numbers(list(ids))
    return (vector / vector.norm()).tolist()


def test_texts_ids_and_arrays_get_their_vectors_though_the_queue_is_short(embedder: LLM):
    outputs = embedder.embed([words(5, 6), [7, 8], np.array([9]), "w5", "w6", "w7"])
    assert [output.prompt for output in outputs] == [words(5, 6), None, None, "w5", "w6", "w7"]
    assert [output.prompt_token_ids for output in outputs[:3]] == [(2, 5, 6, 3), (7, 8), (9,)]
    for output in outputs:
        assert output.outputs.embedding == pytest.approx(unit(*output.prompt_token_ids))
    (one,) = embedder.embed("w5", dimensions=2, normalize=False)
    assert one.outputs.embedding == pytest.approx(numbers([2, 5, 3])[:2].tolist())
    (cut,) = embedder.embed([[*range(5, 105)]], truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == tuple(range(5, 21))


def test_scores_come_from_vectors_or_from_a_cross_encoder(embedder: LLM):
    angles = [output.outputs.score for output in embedder.score("w5", ["w6", "w150"])]
    assert angles == pytest.approx([float(np.dot(unit(2, 5, 3), unit(2, w, 3))) for w in (6, 150)])
    with over(ToyPoolModel(SCORES)) as scorer:
        outputs = scorer.score(["w5", "w7"], ["w6", "w8"], use_activation=False)
        with pytest.raises(WrongTask, match=r"cannot embed: it is a model to score with, for LLM\.score$"):
            scorer.embed("w5")
    assert [output.prompt_token_ids for output in outputs] == [(2, 5, 3, 6, 3), (2, 7, 3, 8, 3)]
    assert outputs[0].outputs.score == pytest.approx(float(numbers([2, 5, 3, 6, 3], [0, 0, 0, 1, 1])[0]))


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda llm: llm.embed(5), InvalidRequest, "prompts: got 5"),
        (lambda llm: llm.embed(["w5", ""]), InvalidRequest, r"prompts\[1\]: must not be empty"),
        (lambda llm: llm.embed([[5], [200]]), InvalidRequest, "token id 200"),
        (lambda llm: llm.embed("w5", dimensions=0), InvalidRequest, "not from 1 to 6"),
        (lambda llm: llm.embed("w5", truncate_prompt_tokens=0), InvalidRequest, "truncate_prompt_tokens"),
        (
            lambda llm: llm.embed(words(*range(5, 25))),
            ContextTooLong,
            "22 tokens and this model's maximum context length is 16",
        ),
        (lambda llm: llm.score("w5", []), InvalidRequest, "documents: give a text or a list"),
        (lambda llm: llm.score(["w5", "w6"], ["w7"] * 3), InvalidRequest, "documents: 3 for 2 queries"),
        (lambda llm: llm.score(["w5", ""], ["w6", "w7"]), InvalidRequest, r"queries\[1\]: must not be empty"),
        (
            lambda llm: llm.score("w5", "w6", use_activation=True),
            InvalidRequest,
            "by their angle",
        ),
        (
            lambda llm: llm.generate(words(*range(5, 25))),
            WrongTask,
            "cannot generate: it is a model to embed",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x"}]),
            WrongTask,
            r"for LLM\.embed and LLM\.score$",
        ),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    embedder: LLM, call: Callable[[LLM], object], kind: type[Exception], said: str
):
    with pytest.raises(kind, match=said):
        call(embedder)
